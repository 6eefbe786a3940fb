"""Marks that the library's test classes carry, and the figures at the end of `make conformance`."""

from collections import Counter, defaultdict

_LIBRARY_MARKS = """
    accelerate_tests bitsandbytes flash_attn_test flash_attn_3_test flash_attn_4_test generate is_training_test
    torch_compile_test torch_export_test
"""
_COLUMNS = ("passed", "failed", "xfailed", "skipped")


def pytest_configure(config):
    for name in _LIBRARY_MARKS.split():  # the project refuses marks that it does not know
        config.addinivalue_line("markers", f"{name}: set by Transformers' own tests")


def pytest_terminal_summary(terminalreporter):
    outcomes = {}
    for column in reversed(_COLUMNS):  # a test with a part that failed has failed
        for report in terminalreporter.stats.get(column, ()):
            is_part = hasattr(report, "context")
            if "conformance" in report.nodeid and (not is_part or column == "failed"):
                outcomes[report.nodeid] = column
    figures = defaultdict(Counter)
    for test, column in outcomes.items():
        figures[test.split("::")[1]][column] += 1
    if len(figures) > 1:
        terminalreporter.write_sep("=", "Transformers' own tests")
        names = ("", "run", "passed", "failed", "excepted", "skipped by themselves")
        terminalreporter.write_line(" | ".join(names))
        for name, counts in sorted(figures.items()):
            run = sum(counts.values()) - counts["skipped"]
            terminalreporter.write_line(" | ".join(map(str, (name, run, *(counts[column] for column in _COLUMNS)))))
