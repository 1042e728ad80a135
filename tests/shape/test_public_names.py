"""``dir(holdfast)`` and ``help(holdfast)`` show the public names, and nothing else."""

from __future__ import annotations

import subprocess
import sys

import holdfast


def output_of(code: str) -> str:
    """What a new process prints: there, no name has been used yet."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout


def test_dir_lists_every_public_name_before_its_first_use() -> None:
    listed = output_of("import holdfast; print(*dir(holdfast))").split()
    assert set(holdfast.__all__) - set(listed) == set()
    assert {name for name in listed if not name.startswith("__")} - set(holdfast.__all__) == {
        "errors"
    }


def test_dir_lists_public_modules_that_are_imported() -> None:
    listed = output_of("import holdfast, holdfast.fencing, holdfast.url; print(*dir(holdfast))")
    assert "fencing" in listed.split()
    assert "url" not in listed.split()


def test_dir_imports_nothing() -> None:
    code = "import sys, holdfast; dir(holdfast); print('holdfast.locks' in sys.modules)"
    assert output_of(code).strip() == "False"


def test_help_describes_what_is_imported_at_its_first_use() -> None:
    shown = output_of("import pydoc, holdfast; print(pydoc.plain(pydoc.render_doc(holdfast)))")
    for text in ("connect(", "connect_async(", "class Lock(", "class Lease(", "class Locks("):
        assert text in shown, text
    for stray in ("import_module", "TYPE_CHECKING"):
        assert stray not in shown, stray
