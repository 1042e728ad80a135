"""What the promises of a Redlock store rest on, node by node: ``check()``."""

from __future__ import annotations

from typing import Any

from holdfast.core.contract import Finding
from holdfast.errors import GuaranteeNotMet
from holdfast.stores.redis.connection import Refused
from holdfast.stores.redis.probe import read_info
from holdfast.stores.redlock.nodes import PING, Fleet, Node, Request, Round
from holdfast.stores.redlock.url import RedlockOptions

__all__ = ["findings"]


async def findings(fleet: Fleet, fan: Any, options: RedlockOptions) -> list[Finding]:
    """One round of looking."""
    request = Request([PING], lambda at: PING, lambda answers: False)
    asked: Round = await fan.ask(request)
    if sum(type(answer) is list for answer in asked.answers) < fleet.quorum:
        raise fleet.unavailable(asked.answers)
    found: list[Finding] = []
    for node, answer in zip(fleet.nodes, asked.answers, strict=True):
        found += _node(fleet, node, answer[0] if type(answer) is list else None, options)
    found.append(_loss(options))
    if options.access.tls and options.access.options.get("ssl_cert_reqs") == "none":
        found.append(Finding("tls", "certificates are not verified", "warning"))
    return found


def _node(fleet: Fleet, node: Node, reply: Any, options: RedlockOptions) -> list[Finding]:
    where = f"redis at {node.address}"
    if reply is None:
        detail = f"it does not answer: one failure less is survived ({node.cause or 'no reply'})"
        return [Finding(where, detail, "warning")]
    if isinstance(reply, Refused):
        return [Finding(where, f"INFO is refused, nothing can be verified: {reply}", "warning")]
    try:
        fleet.judge(node, reply)
    except GuaranteeNotMet as error:
        return [Finding(where, str(error), "broken")]
    info = read_info(reply)
    product = "Valkey" if "valkey_version" in info else "Redis"
    version = info.get("valkey_version") or info.get("redis_version", "?")
    found = [Finding(where, f"{product} {version}, master, run {info.get('run_id', '?')[:8]}")]
    if info.get("aof_enabled") == "1":
        found.append(Finding(where, "the append-only file is on: a restart keeps locks"))
    elif options.loss_protection:
        detail = "no append-only file: after a restart it grants nothing for max_ttl"
        found.append(Finding(where, detail))
    else:
        found.append(Finding(where, "no append-only file: a restart loses its votes", "warning"))
    return found


def _loss(options: RedlockOptions) -> Finding:
    if options.loss_protection:
        return Finding("loss protection", f"on, max_ttl {options.max_ttl:g} s")
    detail = "off: a node that comes back without its data may let two hold at once"
    return Finding("loss protection", detail, "warning")
