"""Several processes share the tests: each runs what no other has begun, and the first reports all.

Most tests wait for half of their time: for the slowest of a few ranks, or for a timeout.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

WORTH = 25  # tests: for fewer no further process is started, which would import torch


def pytest_runtestloop(session):
    """A hook: in place of pytest's own loop, if --processes allows it."""
    config, option = session.config, session.config.option
    if option.share:  # this is a further process
        run_further(session, *option.share.split())
        return True
    processes = min(option.processes, len(session.items) // WORTH)
    if option.collectonly or option.usepdb or option.capture == "no" or session.testsfailed:
        processes = 1
    if processes < 2:
        return None  # pytest goes on with its own loop
    with tempfile.TemporaryDirectory() as folder:
        others = [start(config, folder, number, processes) for number in range(1, processes)]
        try:
            files = [open(f"{folder}/reports{number}") for number in range(1, processes)]
            ran, reported = 0, time.monotonic()
            for _ in run(session, folder, 0, processes):
                ran += 1
                if time.monotonic() - reported > 20:  # seconds: else a line for each few tests
                    ran += report(config, files)
                    reported = time.monotonic()
            statuses = [other.wait() for other in others]
            ran += report(config, files)
            if ran < len(session.items) or not {0, 1}.issuperset(statuses):  # 1: failed tests
                session.testsfailed += 1
                print(f"\n{len(session.items) - ran} tests did not end; further processes ended "
                      f"with the status {statuses}:")
                for path in pathlib.Path(folder).glob("output*"):
                    print(path.read_text())
        finally:
            for other in others:
                other.terminate()
                other.wait()
    return True


def start(config, folder, number, processes):
    """Start a further process. It collects the same tests, since it has the same arguments."""
    pathlib.Path(folder, f"reports{number}").touch()
    with open(f"{folder}/output{number}", "w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *config.invocation_params.args,
             "-p", "no:cacheprovider", "--share", f"{folder} {number} {processes}"],
            cwd=config.invocation_params.dir, stdout=output, stderr=subprocess.STDOUT,
        )


def run_further(session, folder, number, processes):
    config = session.config
    with open(f"{folder}/reports{number}", "w") as file:
        def write(report):
            data = config.hook.pytest_report_to_serializable(config=config, report=report)
            print(json.dumps([report.nodeid, report.location, data]), file=file, flush=True)

        config.pluginmanager.register(types.SimpleNamespace(pytest_runtest_logreport=write))
        for _ in run(session, folder, int(number), int(processes)):
            pass


def run(session, folder, number, processes):
    """Run the tests that no other process has claimed. Yields after each. Processes 0 and 1 go
    towards each other, from the two ends of their part of the list, and so do 2 and 3: then few
    fixtures of a module are made twice."""
    items = list(enumerate(session.items))
    first = (number + number % 2) * len(items) // processes
    order = items[first:] + items[:first]
    if number % 2:
        order.reverse()
    mine = (item for i, item in order if claim(f"{folder}/{i}"))
    item = next(mine, None)
    while item:
        following = next(mine, None)  # now: pytest keeps the fixtures that it needs
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        yield
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following


def claim(path):
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def report(config, files):
    """Report what further processes have run since the last call, as if this one had run it.
    Returns how many tests have ended."""
    ended = 0
    for file in files:
        place = file.tell()
        while (line := file.readline()).endswith("\n"):
            place = file.tell()
            nodeid, location, data = json.loads(line)
            ended += data["when"] == "teardown"
            if data["when"] == "setup":
                config.hook.pytest_runtest_logstart(nodeid=nodeid, location=location)
            config.hook.pytest_runtest_logreport(
                report=config.hook.pytest_report_from_serializable(config=config, data=data)
            )
        file.seek(place)  # of a line that is not complete yet
    return ended
