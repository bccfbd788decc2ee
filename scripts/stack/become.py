"""Write this process's pid and start time to a file, then become another program.

Usage: become.py PIDFILE COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Do it."""
    pid_file, command = sys.argv[1], sys.argv[2:]
    with open("/proc/self/stat") as stat:
        start_time = int(stat.read().rpartition(") ")[2].split()[19])
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    partial = f"{pid_file}.partial"
    with open(partial, "w") as file:
        json.dump({"pid": os.getpid(), "start_time": start_time, "boot": boot}, file)
    os.replace(partial, pid_file)
    os.execvpe(command[0], command, os.environ)


if __name__ == "__main__":
    main()
