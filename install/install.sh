#!/bin/sh
# Installs lora-train on Linux and macOS; the options are those of install.py (--help).
# Usage: sh install/install.sh [--yes] [--dry-run] [--gpu auto|cuda|cuda-old|rocm|xpu|mps|cpu] [--uninstall]
set -eu
here=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

for name in python3.12 python3.13 python3.11 python3 python; do
  if command -v "$name" >/dev/null 2>&1 &&
    "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
    exec "$name" "$here/install.py" "$@"
  fi
done
echo "install: no Python 3.11 to 3.13 found; install one (Debian, Ubuntu: apt install python3 python3-venv; macOS: python.org)" >&2
exit 1
