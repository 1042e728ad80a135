"""``holdfast init`` on stores with loss protection: before it they wait, after it they grant."""

from __future__ import annotations

import pytest

from cli.processes import Cli
from servers.ensemble import Ensemble
from servers.redis import RedisServer

URLS = {
    "redis": ("redis://{}?loss_protection=on", 1),
    "redlock": ("redlock://{}", 3),
}


@pytest.mark.parametrize("store", URLS)
def test_a_new_deployment_grants_at_once_when_it_is_marked(cli: Cli, store: str) -> None:
    """Before, a command is not run, and both who waits and who must not is told why."""
    form, count = URLS[store]
    with Ensemble([RedisServer() for _ in range(count)]) as nodes:
        url = form.format(nodes.hosts)
        run = ("run", "name", "--url", url)
        refused = cli(*run, "-n", "--", "echo", "held")
        assert (refused.returncode, refused.stdout) == (75, "")
        assert "may have lost holds (loss_protection; " in refused.stderr
        assert "`holdfast init`" in refused.stderr

        waited = cli(*run, "-w", "2", "--", "echo", "held")
        assert (waited.returncode, waited.stdout) == (75, "")
        assert waited.stderr.startswith("holdfast: waiting for 'name': ")

        init = cli("init", url)
        assert (init.returncode, init.stderr) == (0, "")
        assert "marked as new" in init.stdout

        granted = cli(*run, "-n", "--", "echo", "held")
        assert (granted.returncode, granted.stdout, granted.stderr) == (0, "held\n", "")
