#!/bin/sh
# Make a virtual environment and install into it: setup_venv.sh VENV PYTHON TORCH [pip arguments...]
#
# A usable torch (2.11 or newer) that PYTHON can import is kept: the environment then sees PYTHON's packages.
set -eu
venv=$1 python=$2 torch=$3
shift 3

usable() {
    "$1" -c 'import re, sys, torch
major, minor = map(int, re.findall(r"\d+", torch.__version__)[:2])
sys.exit((major, minor) < (2, 11))' 2>/dev/null
}

if [ ! -x "$venv/bin/python" ]; then
    if usable "$python"; then
        echo "[setup] making $venv around the torch of $python"
        "$python" -m venv --system-site-packages "$venv"
    else
        echo "[setup] making $venv"
        "$python" -m venv "$venv"
    fi
fi
if usable "$venv/bin/python"; then
    echo "[setup] torch $("$venv/bin/python" -c 'import torch; print(torch.__version__)') is there"
else
    echo "[setup] installing $torch (a few minutes the first time)"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
fi
echo "[setup] installing moe_ops: $*"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
echo "[setup] ready"
