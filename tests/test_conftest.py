"""The tests' own rules: one that hangs fails alone, and whatever a test started ends with it."""

import os
import re
import shutil
import signal
import textwrap
from pathlib import Path

import jax
import pytest
import scripts

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="finds processes as Linux shows them")

TESTS = """
    import os, signal, subprocess, sys, threading
    from pathlib import Path

    import conftest
    import pytest
    import scripts

    @pytest.fixture
    def short(monkeypatch):
        monkeypatch.setattr(conftest, "LIMIT", 1.0)

    ORPHAN = '''
    import os, subprocess, sys, time
    if sys.argv[1] == "parent":
        command = [sys.executable, "-c", sys.argv[2], "child", "", sys.argv[3]]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.Popen(command, start_new_session=True, **quiet)
    else:
        with open(sys.argv[3], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    '''

    def start_orphan() -> None:
        os.mkfifo("pid")
        scripts.run("-c", ORPHAN, "parent", ORPHAN, "pid")
        Path("orphan").write_text(Path("pid").read_text())

    def test_that_hangs(short):
        thread = threading.Thread(target=over.wait, name="bystander")
        thread.start()
        try:
            threading.Event().wait()
        finally:
            over.set()
            thread.join()

    over = threading.Event()

    def test_that_hangs_twice(short):
        try:
            threading.Event().wait()
        finally:
            threading.Event().wait()

    def test_that_fails_and_leaves_an_orphan():
        start_orphan()
        assert "on purpose" == ""

    def test_that_leaks_a_child():
        global child
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def test_that_passes():
        assert scripts.ended([child.pid])
        child.wait()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_that_is_killed():
        start_orphan()
        os.kill(os.getpid(), signal.SIGKILL)
"""


def run_tests(folder: Path, tests: str, *options: str, document: str = "") -> tuple[int, str]:
    """Run tests with interrupts ignored, as in the background: how that ended, and what was printed."""
    (folder / "test_sample.py").write_text(textwrap.dedent(tests))
    (folder / "README.md").write_text(document)
    shutil.copy(ROOT / "conftest.py", folder)
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=short", *options]
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = scripts.run(
            *command,
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{os.environ.get('PYTHONPATH', '')}"},
        )
    finally:
        signal.signal(signal.SIGINT, ignored)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_hang_fails_one_test_and_processes_end_with_theirs(tmp_path: Path) -> None:
    code, output = run_tests(tmp_path, TESTS, "--deselect", "test_sample.py::test_that_is_killed")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "3 failed, 2 passed, 1 deselected, 1 error" in output
    assert "the test hangs: it took longer than 1 s" in output
    assert "thread 'bystander'" in output
    assert "FAILED test_sample.py::test_that_hangs_twice" in output
    assert "ERROR test_sample.py::test_that_leaks_a_child" in output
    assert "the test leaked process" in output
    assert scripts.ended([int((tmp_path / "orphan").read_text())])


def test_processes_end_with_a_test_run_that_is_killed(tmp_path: Path) -> None:
    code, _ = run_tests(tmp_path, TESTS, "-k", "test_that_is_killed")
    assert code == -signal.SIGKILL
    scripts.eventually(lambda: scripts.ended([int((tmp_path / "orphan").read_text())]))


# Leaks -------------------------------------------------------------------------------------------

LEAKS = """
import os, subprocess, sys, threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import leaks

leaks.PATIENCE = 0.05
leaks.SEGMENTS = Path("segments")  # other test runs on this machine must not see ours
undo = []

def teardown_module():
    for function in undo:
        function()

def test_thread():
    event = threading.Event()
    threading.Thread(target=event.wait, name="forgotten").start()
    undo.append(event.set)

def test_file(tmp_path):
    file = open(tmp_path / "forgotten", "w")
    undo.append(file.close)

def test_process():
    process = subprocess.Popen([sys.executable, "-c", "input() or 'forgotten'"], stdin=subprocess.PIPE)
    undo.append(process.communicate)

def test_segment():
    segment = SharedMemory(create=True, size=8)
    undo.extend([segment.unlink, segment.close])

def test_segment_of_nobody():
    (leaks.SEGMENTS / "forgotten").touch()

def test_clean():
    thread = threading.Thread(target=subprocess.run, args=(["true"],))
    thread.start()
    segment = SharedMemory(create=True, size=8)
    segment.unlink()
    segment.close()

def test_clean_once_collected():
    ends = os.pipe()
    file = os.fdopen(ends[0])
    os.close(ends[1])
    cycle = [file]
    cycle.append(cycle)
"""


DOCUMENT = """
```python
import os
ends = os.pipe()
```

```python
for end in ends:
    os.close(end)
```

```python
>>> 1 + 1
3
```
"""


def test_leaks_are_found_and_named_in_tests_and_in_documents(tmp_path: Path) -> None:
    (tmp_path / "segments").mkdir()
    code, report = run_tests(tmp_path, LEAKS, "--color=no", "--basetemp=temporary", ".", document=DOCUMENT)
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 9 passed, 6 errors" in report, report
    for where, leak in {
        "test_thread": r"thread 'forgotten'",
        "test_file": r"file descriptor \d+ \(.*/forgotten\)",
        "test_process": r"process \d+ \(.*'forgotten'\)",
        "test_segment": r"file descriptor \d+ \(/dev/shm/psm_",
        "test_segment_of_nobody": r"shared memory segments/forgotten",
        "README.md line=2 column=1": r"file descriptor \d+ \(pipe:",
    }.items():
        assert re.search(rf"ERROR at teardown of {where} _+\nthe test leaked .*{leak}", report), report


# JAX's compilation cache -------------------------------------------------------------------------


def test_half_an_entry_in_the_compilation_cache_does_no_harm() -> None:
    """A process that is killed leaves one behind, and all processes share the cache."""
    cache = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    before = set(cache.iterdir())
    square = jax.jit(lambda x: x * x + 12345.0)
    expected = square(3.0)
    torn = set(cache.iterdir()) - before
    assert torn
    for path in torn:
        path.write_bytes(path.read_bytes()[:50])
    jax.clear_caches()
    assert square(3.0) == expected
