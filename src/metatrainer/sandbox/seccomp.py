"""The system calls that are refused inside the sandbox, compiled to filters.

A deny list of what namespaces and limits do not cover: looking into other processes, memory that
no limit counts, anything that outlives a session or joins two, changing the limits or priority of
process 1, and wide parts of the kernel that no environment needs. Two filters: one for the whole
sandbox, and a stricter one for the processes that run submitted code. Knows nothing about who
uses them.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Mapping

from metatrainer.errors import SandboxUnavailable

# name: number on x86_64, number on aarch64; None where a machine has no such call
DENIED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # memory and objects that no process's limits count, or that outlive a session
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # wide kernel interfaces that no environment needs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "syslog": (103, 116),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    # the machine: modules, clocks, swap, ports
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    # priorities, which may be those of process 1
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
DENIED_TO_SESSIONS: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts, which the sandbox itself needs to set sessions apart
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "mount_setattr": (442, 442),
    # sockets: sessions of one sandbox share a network, and some kinds (vsock) know no namespaces
    "socket": (41, 198),
    "bind": (49, 200),
    "connect": (42, 203),
    "listen": (50, 201),
}
MISSING = {"clone3": (435, 435)}
"""Answered as if the kernel had no such call: its flags cannot be looked at, and the library then
takes the older clone."""
NEW_NAMESPACES = 0x7E020000
"""Flags of clone that make a namespace."""
CLONE = (56, 220)
OWN_ONLY = {"prlimit64": (302, 261)}
"""Allowed where the first argument is 0: the caller itself."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE, ABSENT = 0x00050001, 0x00050026  # EPERM, ENOSYS
X32 = 0x40000000
"""Numbers from here on are x86_64's second set of calls, which would pass by the list."""

Code = list[tuple[int, int, int, int]]


def program(machine: str | None = None, *, session: bool = False) -> bytes:
    """The filter of a machine, by default this one, as bubblewrap and the kernel read it.

    session: the stricter one. Raises SandboxUnavailable for a machine that is not known.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise SandboxUnavailable(f"no system call filter for {machine}; only for {known}")
    column, architecture = ARCHITECTURES[machine]
    code: Code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL)]
    code += [(LOAD, 0, 0, NUMBER), (AT_LEAST, 0, 1, X32), (RETURN, 0, 0, REFUSE)]
    code += _answer(DENIED, column, REFUSE)
    if session:
        code += _answer(DENIED_TO_SESSIONS, column, REFUSE) + _answer(MISSING, column, ABSENT)
        code += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
        code += [(ANY_BIT, 0, 1, NEW_NAMESPACES), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    for numbers in OWN_ONLY.values():
        code += [(EQUAL, 0, 4, numbers[column]), (LOAD, 0, 0, FIRST_ARGUMENT)]
        code += [(EQUAL, 1, 0, 0), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code.append((RETURN, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def _answer(calls: Mapping[str, tuple[int | None, int | None]], column: int, action: int) -> Code:
    code: Code = []
    for numbers in calls.values():
        if (number := numbers[column]) is not None:
            code += [(EQUAL, 0, 1, number), (RETURN, 0, 0, action)]
    return code
