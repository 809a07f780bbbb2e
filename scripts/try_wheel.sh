#!/usr/bin/env bash
# Installs a wheel into a fresh virtual environment, far from the sources, and uses it as a new user does: scripts/try_wheel.sh dist/unisono-*.whl
set -euo pipefail
wheel="$(realpath "$1")"
constraints="$(realpath "$(dirname "$0")/../constraints.txt")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --constraint "$constraints" torch
"$folder/venv/bin/pip" install --quiet --constraint "$constraints" "$wheel[train]"
cd "$folder"
export PATH="$folder/venv/bin:$PATH" XDG_CACHE_HOME="$folder/cache" HF_HUB_OFFLINE=1
unisono --version
printf '{"prompt": "%s", "completion": "%s"}\n' hello there good day good night > rows.jsonl
unisono init --data rows.jsonl --out train.yaml
unisono train train.yaml model=builtin:tiny output_dir=runs/first "duration=3 steps" batch.global=1
unisono generate runs/first hello --max-tokens 4
unisono export runs/first merged --merge
unisono diagnose runs/first
echo "the wheel works: $(basename "$wheel"), $(du -h "$wheel" | cut -f 1)"
