from types import SimpleNamespace
from typing import Any

from tests.support.triton_interpreter import _once_a_launch, _once_a_type


class Patches:
    """In the place of the interpreter's `_patch_lang`."""

    def __init__(self) -> None:
        self.patched: list[str] = []
        self.num_restored = 0

    def __call__(self, function: Any) -> Any:
        self.patched.append(function.__globals__["name"])
        return SimpleNamespace(restore=self._restore)

    def _restore(self) -> None:
        self.num_restored += 1


def function_of(module: dict[str, str]) -> Any:
    return SimpleNamespace(__globals__=module)


def test_the_language_is_patched_once_a_launch_and_module() -> None:
    patches, ours, tritons = Patches(), {"name": "ours"}, {"name": "triton's"}
    patch = _once_a_launch(patches)
    for launch in range(1, 4):
        scope = patch(function_of(ours))
        for module in (ours, tritons, ours, tritons):
            patch(function_of(module))
        assert patches.patched == ["ours", "triton's"] * launch
        scope.restore()
        assert patches.num_restored == launch


def test_types_of_arrays_are_found_by_what_is_in_them() -> None:
    asked = []
    find = _once_a_type(lambda scalar: asked.append(scalar.name) or f"numpy's {scalar.name}")
    for name in ("int32", "fp32", "int32"):
        scalar = SimpleNamespace(name=name)
        scalar.scalar = scalar
        assert find(SimpleNamespace(scalar=scalar)) == find(scalar) == f"numpy's {name}"
    assert asked == ["int32", "fp32"]
