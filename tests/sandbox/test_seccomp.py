"""The filters of system calls, run as the kernel would run them."""

import struct

import pytest

from metatrainer.sandbox import seccomp

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
READ = {"x86_64": 0, "aarch64": 63}


def verdict(machine, number, argument=0, session=True, architecture=None):
    """What a filter says to a call: an interpreter of the few instructions that it is made of."""
    _, own = seccomp.ARCHITECTURES[machine]
    data = struct.pack("=iIQ6Q", number, architecture or own, 0, argument, 0, 0, 0, 0, 0)
    code = list(struct.iter_unpack("=HBBI", seccomp.program(machine, session=session)))
    at, value = 0, 0
    while True:
        what, yes, no, operand = code[at]
        at += 1
        match what:
            case 0x20:
                value = struct.unpack_from("=I", data, operand)[0]
            case 0x15:
                at += yes if value == operand else no
            case 0x35:
                at += yes if value >= operand else no
            case 0x45:
                at += yes if value & operand else no
            case 0x06:
                return operand


MACHINES = pytest.mark.parametrize("machine", seccomp.ARCHITECTURES)


@MACHINES
def test_the_listed_calls_are_refused_and_others_are_not(machine):
    column, _ = seccomp.ARCHITECTURES[machine]
    for session in (False, True):
        assert verdict(machine, READ[machine], session=session) == ALLOW
        for name, numbers in seccomp.DENIED.items():
            if numbers[column] is not None:
                assert verdict(machine, numbers[column], session=session) == EPERM, name
    for name, numbers in seccomp.DENIED_TO_SESSIONS.items():
        assert verdict(machine, numbers[column]) == EPERM, name
        assert verdict(machine, numbers[column], session=False) == ALLOW, name


@MACHINES
def test_clone_makes_processes_and_threads_but_no_namespace(machine):
    column, _ = seccomp.ARCHITECTURES[machine]
    clone, fork, thread = seccomp.CLONE[column], 0x01200011, 0x3D0F00
    assert verdict(machine, clone, fork) == ALLOW
    assert verdict(machine, clone, thread) == ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 1 << 28, 1 << 29, 1 << 30):
        assert verdict(machine, clone, fork | flag) == EPERM
    assert verdict(machine, seccomp.MISSING["clone3"][column]) == ENOSYS


@MACHINES
def test_limits_may_be_set_of_oneself_only(machine):
    column, _ = seccomp.ARCHITECTURES[machine]
    number = seccomp.OWN_ONLY["prlimit64"][column]
    assert verdict(machine, number, 0) == ALLOW
    assert verdict(machine, number, 1) == EPERM


def test_other_sets_of_calls_are_refused():
    assert verdict("x86_64", 0, architecture=0x40000003) == KILL  # 32 bit
    assert verdict("x86_64", 0x40000000) == EPERM  # x32
