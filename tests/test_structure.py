"""The shape of the tree: floors, links, names, and what the wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "verl_plugin", "openrlhf_plugin", "vllm_worker_ext", "examples")
# Each floor may import from itself and from those before it.
FLOORS = (
    {"errors", "config"},
    {"kernels"},
    {"delta"},
    {"transport", "rollout"},
    {"vllm_worker_ext", "job"},
    {"verl_plugin", "openrlhf_plugin", "examples", "cli"},
)
FRAMEWORKS = {"vllm", "verl", "openrlhf", "ray", "transformers"}


def _floor(package: str) -> int:
    return next(number for number, names in enumerate(FLOORS) if package in names)


def _modules() -> list[Path]:
    homes = ["sparrowrl", *LINKED]
    found = [path for home in homes for path in (ROOT / home).rglob("*.py") if not path.is_symlink()]
    return sorted({path.resolve() for path in found})


def _own_package(path: Path) -> str | None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] != "sparrowrl" else (parts[1] if parts[1] != "__init__" else None)


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write sparrowrl.*"
            names.append(node.module or "")
            names += [f"{node.module}.{alias.name}" for alias in node.names if node.module == "sparrowrl"]
    return names


def test_nothing_imports_upward() -> None:
    modules = [path for path in _modules() if _own_package(path) is not None]
    assert len(modules) > 20
    bad = []
    for path in modules:
        own = _own_package(path)
        assert own is not None
        for name in _imports(path):
            parts = name.split(".")
            if parts[0] == "sparrowrl" and len(parts) > 1 and _floor(parts[1]) > _floor(own):
                bad.append(f"{path.relative_to(ROOT)} imports {name}")
            if parts[0] in LINKED:
                bad.append(f"{path.relative_to(ROOT)} imports {name}: write sparrowrl.{name}")
            if parts[0] in FRAMEWORKS and _floor(own) < _floor("vllm_worker_ext"):
                bad.append(f"{path.relative_to(ROOT)} imports {name} below its floor")
    assert not bad, "\n".join(bad)


def test_links_point_inside_the_tree() -> None:
    for name in LINKED:
        link = ROOT / "sparrowrl" / name
        assert link.is_symlink(), f"{link} is no symlink: this checkout lost its links (git config core.symlinks)"
        assert link.resolve() == ROOT / name


def test_kernels_is_no_package_of_that_name() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would hide Hugging Face's `kernels`"
    assert not (ROOT / "conftest.py").exists(), "a root conftest.py puts the root on sys.path"


def test_the_core_imports_no_framework() -> None:
    code = "import sys, sparrowrl; print(*sorted(m for m in ('torch', 'numpy', 'vllm', 'aiohttp') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""


@pytest.mark.slow
def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", str(tmp_path), str(ROOT)], check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    expected = set()
    for path in _modules():
        parts = path.relative_to(ROOT).parts
        expected.add("/".join(parts if parts[0] == "sparrowrl" else ("sparrowrl", *parts)))
    assert expected <= held, sorted(expected - held)
