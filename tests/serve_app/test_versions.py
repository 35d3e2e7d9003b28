"""Versions, on machines that a checkout was carried to as well."""

from serve_app.versions import version_of


def test_a_package_that_is_not_installed_has_no_version() -> None:
    assert version_of("truespec") == "0.1.0"
    assert version_of("a-package-that-nobody-has") == "none"
