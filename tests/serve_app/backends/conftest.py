import pytest

pytest.register_assert_rewrite("tests.serve_app.backends.conformance")
