"""Versions, on machines that a checkout was carried to as well."""

from pathlib import Path

from serve_app.versions import version_of

ROOT = Path(__file__).parents[2]


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("truespec") == "0.1.0"
    assert version_of("a-package-that-nobody-has") == "none"


def test_no_module_of_the_service_insists_on_being_installed() -> None:
    """A replica that a checkout was carried to would not start."""
    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "serve_app").rglob("*.py")}
    assert sources
    assert [path.name for path, source in sources.items() if 'version("truespec")' in source] == []
