"""Which addresses no sandbox reaches."""

from __future__ import annotations

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.sandbox.network.rules import (
    forbidden_reason,
    is_own_address,
    parse_private,
    reserved_reason,
)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.1.2.3", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("169.254.169.254", "link-local"),
        ("168.63.129.16", "metadata"),
        ("100.64.0.1", "shared"),
        ("100.100.100.200", "shared"),
        ("192.0.0.192", "reserved"),
        ("198.18.0.1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("::127.0.0.1", "reserved"),
        ("::ffff:127.0.0.1", "loopback"),
        ("::ffff:169.254.169.254", "link-local"),
        ("2002:7f00:1::", "loopback"),
        ("2002:a00:1::5", "private"),
        ("64:ff9b::7f00:1", "loopback"),
        ("64:ff9b::a9fe:a9fe", "link-local"),
        ("64:ff9b:1::1", "reserved"),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", "reserved"),
        ("fe80::1", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("fec0::1", "private"),
        ("fd00:ec2::254", "private"),
        ("ff02::1", "multicast"),
        ("2001:db8::1", "reserved"),
        ("localhost", "malformed"),
        ("", "malformed"),
        ("127.1", "malformed"),
    ],
)
def test_addresses_out_of_reach_say_why(address: str, reason: str) -> None:
    assert forbidden_reason(address) == reason
    assert forbidden_reason(address)


@pytest.mark.parametrize(
    "address",
    [
        "93.184.216.34",
        "172.32.0.1",
        "100.128.0.1",
        "2606:4700::1",
        "::ffff:93.184.216.34",
        "64:ff9b::5db8:d822",
    ],
)
def test_public_addresses_are_in_reach(address: str) -> None:
    assert forbidden_reason(address) is None


@given(st.ip_addresses(v=4))
def test_carried_addresses_are_judged_by_what_they_carry(address: ipaddress.IPv4Address) -> None:
    number, reason = int(address), reserved_reason(address)
    assert reserved_reason(ipaddress.IPv6Address(0xFFFF << 32 | number)) == reason
    assert reserved_reason(ipaddress.IPv6Address(0x64FF9B << 96 | number)) == reason
    assert reserved_reason(ipaddress.IPv6Address(0x2002 << 112 | number << 80)) == reason


@given(st.ip_addresses())
def test_what_the_standard_library_calls_local_is_forbidden(address: ipaddress.IPv4Address) -> None:
    local = address.is_loopback or address.is_link_local or address.is_multicast or address.is_unspecified
    private = address.version == 4 and address.is_private
    assert not (local or private) or reserved_reason(address) is not None


@given(st.text())
def test_any_text_has_a_verdict(text: str) -> None:
    forbidden_reason(text)


def test_the_kernel_knows_this_machines_own_addresses() -> None:
    assert is_own_address(ipaddress.ip_address("127.0.0.1"))
    assert is_own_address(ipaddress.ip_address("::ffff:127.0.0.1"))
    assert not is_own_address(ipaddress.ip_address("93.184.216.34"))


def test_the_address_of_the_outgoing_interface_is_its_own() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("93.184.216.34", 9))
        except OSError:
            pytest.skip("this machine has no route but loopback")
        own = probe.getsockname()[0]
    assert is_own_address(ipaddress.ip_address(own))
    assert forbidden_reason(own)


def test_a_public_address_of_this_machine_is_out_of_reach() -> None:
    assert forbidden_reason("93.184.216.34", lambda address: str(address) == "93.184.216.34") == "own"
    assert forbidden_reason("93.184.216.35", lambda address: str(address) == "93.184.216.34") is None


def test_exceptions_are_exact_addresses_and_ports() -> None:
    assert parse_private(["127.0.0.1:8080", "[::1]:80"]) == {("127.0.0.1", 8080), ("::1", 80)}


@pytest.mark.parametrize(
    "text", ["127.0.0.1", "localhost:80", "10.0.0.0/8", "*:80", "[::0:1]:80", "example.org:80"]
)
def test_anything_wider_is_no_exception(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_private([text])
    assert (caught.value.field, caught.value.received) == ("allow_private", text)
