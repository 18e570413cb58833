from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import EXTENSION, PROMPTS, generate, worker_of
from safetensors.torch import load_file
from zoo import FAMILIES, Tensors, make_model, save_checkpoint

from helpers import skip_before
from sparrowrl.errors import PlacementError
from sparrowrl.vllm_worker_ext.attributes import Attributes
from sparrowrl.vllm_worker_ext.processing import processed
from sparrowrl.vllm_worker_ext.reload import Reload, checkpoint_weights

pytestmark = pytest.mark.vllm
Start = Callable[..., Any]
EXPERTS = "model.layers.0.mlp.experts.routed_experts"
HOOK = "process_weights_after_loading"


class Served:
    """An engine in this process, and the reload of all that vLLM processed in it."""

    def __init__(self, llm: Any) -> None:
        self.llm, self.worker = llm, worker_of(llm)
        self.model, self.config = self.worker.get_model(), self.worker.vllm_config
        self.reload = Reload(self.model, self.config, [known.module for known in processed(self.model)], [])

    def own_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return checkpoint_weights(self.config, self.model)

    def answers(self) -> Any:
        self.llm.reset_prefix_cache()
        return generate(self.llm, PROMPTS)

    def bits(self) -> Tensors:
        """Copies of all parameters and of all tensors that processing made."""
        found = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for known in processed(self.model):
            leaves = Attributes.of(known.module).leaves
            found |= {f"{id(known)}.{path}": leaves[path].tensor.detach().clone() for path in known.made}
        return found

    def addresses(self) -> list[int]:
        return [p.data_ptr() for p in self.model.parameters()]

    def stop(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def serve(engine: Start, tmp_path: Path) -> Callable[..., Served]:
    """serve(family or folder, **arguments) -> the engine of a family's tiny model, or of a checkpoint."""

    def start(what: str | Path, **arguments: Any) -> Served:
        folder = tmp_path / what
        if isinstance(what, str) and not folder.exists():
            make_model(folder, what)
        return Served(engine(folder, worker_extension_cls=EXTENSION, **arguments))

    return start


def same(a: Tensors, b: Tensors) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))
        for x, y in zip(a.values(), b.values(), strict=True)
    )


def others(folder: Path, seed: int) -> Tensors:
    """Other weights for the model in `folder`."""
    random = torch.Generator().manual_seed(100 + seed)
    known = load_file(folder / "model.safetensors")
    return {name: (torch.randn(t.shape, generator=random) * 0.2).to(t.dtype) for name, t in known.items()}


CASES = [
    ("qwen3-moe", {}),
    ("qwen3-moe-stacked", {}),
    ("gpt-oss", {}),
    ("deepseek-v2", {}),
    ("qwen3", {"quantization": "fp8_per_channel"}),
]


@pytest.mark.parametrize(("family", "arguments"), CASES)
def test_reloaded_is_as_loaded(
    serve: Callable[..., Served], tmp_path: Path, family: str, arguments: dict[str, Any]
) -> None:
    arguments = {**arguments, **FAMILIES[family].arguments}
    make_model(tmp_path / family, family)
    expected = []
    for seed in range(3):
        folder = save_checkpoint(tmp_path / family, tmp_path / str(seed), others(tmp_path / family, seed))
        fresh = serve(folder, **arguments)
        expected.append((fresh.bits(), fresh.answers(), fresh.reload.digest()))
        fresh.stop()
    served = serve(family, **arguments)
    addresses, before = served.addresses(), served.bits()
    assert served.reload.prove(served.own_weights) == served.reload.digest()
    assert served.addresses() == addresses and same(served.bits(), before)
    for seed, (bits, answers, digest) in enumerate(expected):
        served.reload.run(others(tmp_path / family, seed).items())
        assert served.addresses() == addresses
        assert same(served.bits(), bits)
        assert served.reload.digest() == digest
        assert served.answers() == answers


@pytest.mark.parametrize(("family", "arguments"), CASES)
def test_weights_that_an_engine_never_held(
    serve: Callable[..., Served], tmp_path: Path, family: str, arguments: dict[str, Any]
) -> None:
    arguments = {**arguments, **FAMILIES[family].arguments}
    make_model(tmp_path / family, family)
    new = [others(tmp_path / family, seed) for seed in range(2)]
    digests = []
    for seed, weights in enumerate(new):
        fresh = serve(save_checkpoint(tmp_path / family, tmp_path / str(seed), weights), **arguments)
        digests.append(fresh.reload.digest())
        fresh.stop()
    served = serve(family, load_format="dummy", **arguments)
    addresses = served.addresses()
    with pytest.raises(PlacementError, match="expected a reload"):
        served.reload.prove(new[0].items)
    assert served.reload.prove(new[0].items, held=False) == digests[0]
    served.reload.run_all(new[1].items())
    assert served.reload.digest() == digests[1] and served.addresses() == addresses


def test_only_the_modules_that_got_weights_change(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve("qwen3-moe")
    served.reload.prove(served.own_weights)
    before = served.bits()
    new = others(tmp_path / "qwen3-moe", 1)
    served.reload.run((name, t) for name, t in new.items() if ".layers.0.mlp.experts." in name)
    changed = {name for name, t in served.bits().items() if not torch.equal(t, before[name])}
    assert changed == {f"{EXPERTS}.w13_weight", f"{EXPERTS}.w2_weight"}
    served.reload.run(served.own_weights())
    assert same(served.bits(), before)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
def test_part_of_a_module_is_refused(serve: Callable[..., Served], tmp_path: Path, family: str) -> None:
    served = serve(family)
    digest, answers = served.reload.prove(served.own_weights), served.answers()
    some = [(name, t) for name, t in served.own_weights() if ".layers.1.mlp." in name and "down_proj" in name]
    with pytest.raises(PlacementError, match=r"layers\.1\.mlp.*all of its weights or none"):
        served.reload.run(some)
    served.reload.run(served.own_weights())
    assert served.reload.digest() == digest and served.answers() == answers


class Lost(Exception):
    """What a source of weights raises in these tests."""


def test_a_reload_that_breaks_off(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve("qwen3-moe")
    digest, answers = served.reload.prove(served.own_weights), served.answers()
    addresses, names = served.addresses(), [name for name, _ in served.model.named_parameters()]
    new = list(others(tmp_path / "qwen3-moe", 1).items())

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from new[: len(new) // 2]
        raise Lost

    with pytest.raises(Lost):
        served.reload.run(broken())
    assert served.addresses() == addresses
    assert [name for name, _ in served.model.named_parameters()] == names
    served.reload.run(served.own_weights())
    assert served.reload.digest() == digest and served.answers() == answers


def test_processing_that_breaks_off(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    served = serve("qwen3-moe")
    digest, answers = served.reload.prove(served.own_weights), served.answers()
    addresses = served.addresses()
    method = type(served.model.get_submodule(EXPERTS).quant_method)
    with monkeypatch.context() as patch:

        def fail(self: Any, layer: torch.nn.Module) -> None:
            raise Lost

        patch.setattr(method, HOOK, fail)
        with pytest.raises(Lost):
            served.reload.run(served.own_weights())
    assert served.addresses() == addresses
    served.reload.run(served.own_weights())
    assert served.reload.digest() == digest and served.answers() == answers


def test_a_loader_that_forgets_is_caught(serve: Callable[..., Served]) -> None:
    served = serve("qwen3-moe")
    before = served.bits()
    forgotten = [(name, t) for name, t in served.own_weights() if "layers.0.mlp.experts.2.up_proj" not in name]
    for held in (True, False):
        with pytest.raises(PlacementError, match=rf"{EXPERTS}\.w13_weight"):
            served.reload.prove(lambda: forgotten, held)
        assert same(served.bits(), before)


def test_a_module_that_gets_nothing_is_caught(serve: Callable[..., Served]) -> None:
    served = serve("qwen3-moe")
    before = served.bits()
    rest = [(name, t) for name, t in served.own_weights() if "layers.0.mlp.experts." not in name]
    for held in (True, False):
        with pytest.raises(PlacementError, match=rf"{EXPERTS}\.w13_weight"):
            served.reload.prove(lambda: rest, held)
        assert same(served.bits(), before)


def test_processing_that_is_not_repeated_is_caught(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve("qwen3-moe")
    before, answers = served.bits(), served.answers()
    method = type(served.model.get_submodule(EXPERTS).quant_method)
    monkeypatch.setattr(method, HOOK, lambda self, layer: None)
    with pytest.raises(PlacementError, match=rf"{EXPERTS}\.w13_weight"):
        served.reload.prove(served.own_weights)
    assert same(served.bits(), before) and served.answers() == answers


def derive(model: Any) -> None:
    model.heads = [model.lm_head.weight.float()]
    model.head_sum = model.lm_head.weight.float().sum()


@pytest.fixture
def derived(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> Served:
    """An engine whose model derives tensors from its output head."""
    skip_before("0.29", "calls a hook of the model")
    from vllm.model_executor.models.llama import LlamaForCausalLM

    monkeypatch.setattr(LlamaForCausalLM, HOOK, derive, raising=False)
    return serve("llama")


def test_derived_tensors_are_derived_again_in_place(derived: Served) -> None:
    head, total = derived.model.heads[0], derived.model.head_sum
    digest = derived.reload.prove(derived.own_weights)
    assert derived.reload.digest() == digest
    derived.model.lm_head.weight.data.mul_(2)
    derived.reload.run(())
    assert derived.model.heads[0] is head and derived.model.head_sum is total
    assert torch.equal(head, derived.model.lm_head.weight.float())
    assert torch.equal(total, head.sum())
    assert derived.reload.digest() != digest
    derived.reload.run(derived.own_weights())
    assert derived.reload.digest() == digest


@pytest.mark.parametrize(
    ("hook", "problem"),
    [
        (lambda self: None, "head_sum: expected processing to make this tensor again"),
        (lambda self: derive(self) or self.heads.append(self.heads[0][:4]), "does not load"),
        (lambda self: derive(self) or setattr(self, "head_sum", self.head_sum.double()), "head_sum: expected a tensor"),
        (lambda self: derive(self) or self.head_sum.random_(), "head_sum: expected a reload of the weights"),
    ],
)
def test_derived_tensors_that_come_out_otherwise_are_caught(
    derived: Served, monkeypatch: pytest.MonkeyPatch, hook: Callable[[Any], None], problem: str
) -> None:
    before, head = derived.bits(), derived.model.heads[0]
    monkeypatch.setattr(type(derived.model), HOOK, hook)
    if problem == "does not load":
        derived.reload.prove(derived.own_weights)  # more than there was does no harm
    else:
        with pytest.raises(PlacementError, match=problem):
            derived.reload.prove(derived.own_weights)
    assert same(derived.bits(), before) and derived.model.heads[0] is head


def test_as_loaded(serve: Callable[..., Served]) -> None:
    served = serve("qwen3-moe")
    served.reload.prove(served.own_weights)
    module = served.model.get_submodule(EXPERTS)
    before, addresses = served.bits(), served.addresses()
    with pytest.raises(Lost), served.reload.as_loaded():
        assert module.w13_weight.is_meta and tuple(module.w13_weight.shape) == (4, 128, 128)
        assert module.w13_weight.weight_loader.__name__ == "weight_loader"
        raise Lost
    assert served.addresses() == addresses and same(served.bits(), before)


def test_plain_modules(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve("qwen3")
    module = served.model.get_submodule("model.norm")
    reload = Reload(served.model, served.config, [], [module])
    digest = reload.prove(served.own_weights)
    new = others(tmp_path / "qwen3", 1)["model.norm.weight"]
    reload.run([("model.norm.weight", new)])
    assert torch.equal(module.weight, new) and reload.digest() != digest
    with pytest.raises(PlacementError, match=r"model\.norm\.weight: expected a reload"):
        reload.prove(lambda: [])
    assert torch.equal(module.weight, new)


def test_checkpoint_weights(serve: Callable[..., Served], tmp_path: Path) -> None:
    served = serve("qwen3-moe")
    files = load_file(tmp_path / "qwen3-moe" / "model.safetensors")
    got = dict(served.own_weights())
    assert got.keys() == files.keys() and all(torch.equal(t, files[name]) for name, t in got.items())
    served.stop()
    assert list(serve("qwen3-moe", load_format="dummy").own_weights()) == []


def test_a_checkpoint_of_four_bits(serve: Callable[..., Served], tmp_path: Path) -> None:
    make_model(tmp_path / "w4", "qwen3-w4")
    served = serve("w4")
    before, answers = served.bits(), served.answers()
    served.reload.prove(served.own_weights)
    served.reload.run(served.own_weights())
    assert same(served.bits(), before) and served.answers() == answers


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="with AMX vLLM packs 8-bit weights into tensors")
def test_weights_packed_out_of_reach_are_refused(serve: Callable[..., Served], tmp_path: Path) -> None:
    make_model(tmp_path / "w8", "qwen3-w8")
    with pytest.raises(PlacementError, match=r"qkv_proj: expected weights in tensors.*handler_tensor"):
        serve("w8")
