#!/usr/bin/env bash
# Installs the Debian packages for `make test-cluster` if it is allowed to, else prints what is missing. It never fails:
# the tests themselves check whether they can run.
set -uo pipefail
export PATH=$PATH:/usr/sbin:/sbin
declare -A package_of=([ip]=iproute2 [tc]=iproute2 [sshd]=openssh-server [ssh]=openssh-client [rsync]=rsync
  [unshare]=util-linux [nsenter]=util-linux [taskset]=util-linux [flock]=util-linux [uptime]=procps [make]=make)
packages=()
for tool in "${!package_of[@]}"; do
  command -v "$tool" >/dev/null || packages+=("${package_of[$tool]}")
done
[ ${#packages[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  policy=/usr/sbin/policy-rc.d
  if [ ! -e $policy ]; then # the installed server must not start on this machine
    printf '#!/bin/sh\nexit 101\n' >$policy && chmod +x $policy && trap 'rm -f $policy' EXIT
  fi
  install() { DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" >/dev/null; }
  # Package lists may be missing or outdated.
  install 2>/dev/null || { apt-get update >/dev/null && install; } && exit 0
fi
echo "make test-cluster needs these packages: ${packages[*]}" >&2
exit 0
