#!/usr/bin/env bash
# Installs the programs that tests need beside Python, on Debian and Ubuntu, and llama.cpp's library from npm; called by `make system`, as root.
# What is there already stays as it is.
# Services that come with them (an SSH server, Slurm's and munge's daemons) are neither started now nor at the next boot: tests start their own.
set -euo pipefail

packages=(
  util-linux mount e2fsprogs procps        # namespaces, mounts, file systems that freeze, kill
  iproute2 iptables                        # networks between nodes, and firewalls in them
  openssh-client openssh-server            # --hosts
  slurmctld slurmd slurm-client munge      # --launcher slurm
  tmux                                     # terminals
  nodejs                                   # the search of the documentation site
  zsh fish                                 # completion with the Tab key
  chromium fonts-noto-cjk                  # the pages of `unisono board`, in both languages
)
llama_cpp=@node-llama-cpp/linux-x64@3.22.1  # GGUF files; built, so that nothing is compiled, and without node-llama-cpp itself
services=(ssh sshd munge slurmctld slurmd)

is_installed() { [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

if ! command -v apt-get >/dev/null; then
  echo "make system: there is no apt-get here. Install what these packages of Debian hold: ${packages[*]}" >&2
  exit 2
fi
needs_llama_cpp() { [ "$(uname -m)" = x86_64 ] && [ ! -d "/usr/local/lib/node_modules/${llama_cpp%@*}" ]; }
if needs_llama_cpp && ! command -v npm >/dev/null; then packages+=(npm); fi
missing=()
for package in "${packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if [ ${#missing[@]} -eq 0 ] && ! needs_llama_cpp; then
  echo "make system: all ${#packages[@]} packages are installed, and llama.cpp where it can be"
  exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "make system: what is missing must be installed by root: sudo make system" >&2
  exit 2
fi
install_llama_cpp() {
  if ! needs_llama_cpp; then return; fi
  npm install --global --prefix /usr/local --silent --ignore-scripts "$llama_cpp"
  echo "make system: installed $llama_cpp"
}
if [ ${#missing[@]} -eq 0 ]; then
  install_llama_cpp
  exit 0
fi

policy=/usr/sbin/policy-rc.d  # apt's hook that keeps new services from being started
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
  trap 'rm -f "$policy"' EXIT
fi
units() { find /etc/systemd/system -type l 2>/dev/null | sort; }  # a link is what enables a service, also where systemd does not run
before="$(units)"
export DEBIAN_FRONTEND=noninteractive
apt-get update --quiet=2
apt-get install --yes --quiet=2 --no-install-recommends "${missing[@]}"
added="$(comm -13 <(echo "$before") <(units) | grep -E "/($(IFS='|'; echo "${services[*]}"))\.(service|socket)$" || true)"
xargs --no-run-if-empty rm -f <<<"$added"
echo "make system: installed ${missing[*]}"
install_llama_cpp
