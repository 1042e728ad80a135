"""A store whose client library is not installed says how to install it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.url import BACKENDS

PACKAGES = {
    "redis": ("hiredis",),
    "zookeeper": (),  # for one option only
    "etcd": ("hpack",),
    "consul": ("httptools",),
    "postgresql": ("psycopg",),
    "mysql": ("pymysql",),
}
"""By extra: the packages that it installs."""
PROGRAM = """\
import sys
for package in sys.argv[2].split(","):
    sys.modules[package] = None  # as if it was not installed
import holdfast
connect = getattr(holdfast, sys.argv[3])
try:
    connect(sys.argv[1])
except ModuleNotFoundError as error:
    print(error)
else:
    print("no error")
"""


def connect_without(url: str, packages: str, connect: str) -> str:
    command = [sys.executable, "-c", PROGRAM, url, packages, connect]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_option_names_its_own_package() -> None:
    """SASL is all that ZooKeeper needs a package for."""
    text = connect_without("zookeeper://u:p@h1/?auth=sasl", "puresasl", "connect")
    assert "pip install 'holdfast[zookeeper]'" in text, text


def test_every_extra_is_here() -> None:
    assert {extra for _, extra in BACKENDS.values() if extra} == set(PACKAGES)


@pytest.mark.parametrize(
    ("scheme", "extra", "package"),
    [
        (scheme, extra, package)
        for scheme, (_, extra) in BACKENDS.items()
        for package in PACKAGES.get(extra, ())
    ],
)
def test_a_missing_package_names_its_extra(scheme: str, extra: str, package: str) -> None:
    """``connect()`` names the extra, whichever of its packages is missing."""
    hosts = "h1,h2,h3" if scheme in ("redlock", "redis+sentinel") else "h1"
    url = f"{scheme}://{hosts}/service" if scheme != "redlock" else f"{scheme}://{hosts}"
    url = (
        "unix:///socket" if scheme == "unix" else url.replace("consul://h1/service", "consul://h1")
    )
    if scheme.startswith(("etcd", "consul", "redis+cluster")) or scheme in ("redis", "rediss"):
        url = f"{scheme}://{hosts}"
    for connect in ("connect", "connect_async"):
        text = connect_without(url, package, connect)
        assert f"pip install 'holdfast[{extra}]'" in text, text
