"""Which releases are tried."""

from tests.releases.__main__ import FILES, ROOT, supported


def test_of_what_pip_finds_those_in_the_range_oldest_first() -> None:
    said = "distributed (2026.9.0)\nAvailable versions: 2026.9.0, 2026.8.10, 2026.8.2, 2026.8.0, 2026.7.1, 2025.12.0\n"
    assert supported(said) == ["2026.8.0", "2026.8.2", "2026.8.10"]
    assert supported("ERROR: nothing") == []


def test_the_files_are_there() -> None:
    assert [name for name in FILES if not (ROOT / name).exists()] == []
