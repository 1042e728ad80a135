"""Prometheus, with the rules and the targets of a test."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from servers.missing import program
from servers.process import Server


class PrometheusServer(Server):
    """Scrapes ``targets`` (``host:port``) every second and evaluates ``rules`` as often."""

    name = "prometheus"

    def __init__(self, rules: str, targets: Sequence[str]) -> None:
        super().__init__()
        self._rules, self._targets = rules, list(targets)

    def binary(self, name: str = "prometheus") -> Path:
        return program(name, "prometheus")

    def command(self) -> list[str | Path]:
        rules, config = self.folder / "rules.yml", self.folder / "prometheus.yml"
        rules.write_text(self._rules)
        config.write_text(
            json.dumps(  # which is YAML, too
                {
                    "global": {
                        "scrape_interval": "1s",
                        "scrape_timeout": "1s",
                        "evaluation_interval": "1s",
                    },
                    "rule_files": [str(rules)],
                    "scrape_configs": [
                        {"job_name": "holdfast", "static_configs": [{"targets": self._targets}]}
                    ],
                }
            )
        )
        words: list[str | Path] = [self.binary(), f"--config.file={config}"]
        words += [
            f"--storage.tsdb.path={self.data}",
            f"--web.listen-address={self.host}:{self.port}",
        ]
        return words

    def answers(self) -> bool:
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)

    def url_at(self, port: int) -> str:
        return f"http://{self.host}:{port}"

    def firing(self) -> set[str]:
        """The names of the alerts that fire now."""
        return {labels["alertname"] for labels in self._firing()}

    def kinds(self, alert: str) -> set[str]:
        """The kinds of locks for which an alert fires now."""
        return {labels["kind"] for labels in self._firing() if labels["alertname"] == alert}

    def _firing(self) -> list[dict[str, str]]:
        with urllib.request.urlopen(f"{self.url}/api/v1/alerts", timeout=5) as answer:
            alerts = json.load(answer)["data"]["alerts"]
        return [each["labels"] for each in alerts if each["state"] == "firing"]
