"""Folders that tests read: the repository, the tests, and files written by earlier versions or by peers."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
GOLDEN = TESTS / "golden"
