"""Which names rules allow, and which texts are not valid rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.sandbox.network.rules import (
    HostError,
    Rule,
    canonical_host,
    join_authority,
    parse_rule,
    parse_rules,
    permits,
    split_authority,
)

LABELS = st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True)
NAMES = st.lists(LABELS, min_size=2, max_size=4).map(".".join).filter(lambda n: not n.endswith("localhost"))
PORTS = st.integers(1, 65535)


def test_a_rule_without_a_port_means_443() -> None:
    assert parse_rule("example.org") == Rule("example.org", 443)


def test_a_rule_allows_its_host_at_its_port_only() -> None:
    rules = parse_rules(["pypi.org:443"])
    assert permits(rules, "pypi.org", 443)
    assert not permits(rules, "pypi.org", 80)
    assert not permits(rules, "files.pypi.org", 443)
    assert not permits(rules, "pypi.org.example.org", 443)
    assert not permits(rules, "notpypi.org", 443)


def test_a_wildcard_allows_every_depth_below_and_not_the_domain() -> None:
    rules = parse_rules(["*.debian.org:80"])
    assert permits(rules, "deb.debian.org", 80)
    assert permits(rules, "a.b.debian.org", 80)
    assert not permits(rules, "debian.org", 80)
    assert not permits(rules, "evildebian.org", 80)


def test_no_rules_allow_nothing() -> None:
    assert not permits((), "example.org", 443)


@pytest.mark.parametrize("host", ["Example.ORG", "example.org.", "EXAMPLE.org."])
def test_case_and_a_trailing_dot_do_not_matter(host: str) -> None:
    assert permits(parse_rules(["example.org"]), host, 443)
    assert permits(parse_rules([host]), "example.org", 443)


def test_a_name_in_another_script_is_compared_in_its_ascii_form() -> None:
    assert permits(parse_rules(["bücher.example"]), "xn--bcher-kva.example", 443)


def test_a_name_in_another_script_is_refused_in_a_request() -> None:
    assert not permits(parse_rules(["bücher.example"]), "bücher.example", 443)
    assert not permits(parse_rules(["kube.example"]), "\u212aube.example", 443)


def test_ipv6_rules_match_every_spelling_of_the_address() -> None:
    rules = parse_rules(["[2606:4700:0:0::1]:8443"])
    assert rules == (Rule("2606:4700::1", 8443),)
    assert permits(rules, "2606:4700:0:0:0:0:0:1", 8443)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "*",
        "*:443",
        "*.",
        "*.org",
        "*.*.org",
        "a.*.org",
        "*.127.0.0.1",
        "*.[::1]:80",
        "example.org:",
        "example.org:0",
        "example.org:65536",
        "example.org:080",
        "example.org:https",
        "example.org:80:80",
        "https://example.org",
        "example.org/path",
        "user@example.org",
        " example.org",
        "example.org ",
        "exam ple.org",
        "example..org",
        "-a.org",
        "a-.org",
        "a" * 64 + ".org",
        "a." * 127 + "org",
        "::1",
        "[::1",
        "[::1]80",
        "[fe80::1%eth0]:80",
        "[1.2.3.4]:80",
        "127.1",
        "0x7f000001",
        "0177.0.0.1",
        "1.2.3.4.5",
        "256.1.1.1",
        "2130706433",
        "straße.de",
        "example.org\n",
        "example.org\0",
        "localhost",
        "LOCALHOST.:8080",
        "*.foo.localhost",
        "ip6-localhost:80",
    ],
)
def test_nonsense_is_no_rule(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(text)
    assert caught.value.field == "network.allow"
    assert caught.value.received == text
    assert caught.value.fix


@pytest.mark.parametrize(
    "host",
    [
        "2130706433",
        "0x7f.1",
        "0x7f000001",
        "0177.0.0.1",
        "127.1",
        "127.0.1",
        "0x",
        "foo.0x1",
        "1.2.3.04",
        "\uff11\uff12\uff17.0.0.1",
    ],
)
def test_numbers_that_libraries_take_for_addresses_are_no_hosts(host: str) -> None:
    with pytest.raises(HostError):
        canonical_host(host)


@given(st.text() | st.text("a.*:[]0123456789xf-%@/ "))
def test_any_text_is_a_rule_or_a_config_error(text: str) -> None:
    try:
        rule = parse_rule(text)
    except ConfigError:
        return
    prefix = "*." if rule.subdomains else ""
    assert parse_rule(prefix + join_authority(rule.host, rule.port)) == rule


@given(st.text() | st.text("a.:[]0123456789xf-%"), st.integers())
def test_permits_never_raises(host: str, port: int) -> None:
    permits(parse_rules(["*.example.org", "example.org", "[2606::1]:80"]), host, port)


@given(NAMES, PORTS, LABELS)
def test_a_wildcard_rule_and_its_plain_rule_never_overlap(name: str, port: int, label: str) -> None:
    plain, wild = parse_rule(f"{name}:{port}"), parse_rule(f"*.{name}:{port}")
    assert plain.matches(name, port) and not wild.matches(name, port)
    assert wild.matches(f"{label}.{name}", port) and not plain.matches(f"{label}.{name}", port)
    assert not wild.matches(f"{label}{name}", port)


@given(st.ip_addresses(), PORTS)
def test_addresses_survive_a_round_trip(address: object, port: int) -> None:
    host = canonical_host(str(address))
    assert split_authority(join_authority(host, port), None) == (host, port)
