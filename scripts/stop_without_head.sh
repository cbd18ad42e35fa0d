#!/usr/bin/env bash
# Runs on a worker of cluster.yaml: stops Ray there once the head's has been stopped, which `ray down` does not do.
#   stop_without_head.sh HEAD
# A head that refuses connections runs without Ray. One that does not answer may come back, which Ray handles.
# A worker that was assigned to another head is watched for that head only.
set -u
head=$1 refusals=0 watched=~/.ray/watched_head
echo "$head" >"$watched"
exec 9>"$watched.$head"
flock -n 9 || exit 0 # an earlier instance is still watching
while [ $refusals -lt 5 ]; do
  sleep 3
  [ "$(cat "$watched")" = "$head" ] || { rm -f "$watched.$head"; exit 0; }
  if LC_ALL=C timeout 2 bash -c "exec 3<>/dev/tcp/$head/6379" 2>&1 9>&- | grep -q 'Connection refused'; then
    refusals=$((refusals + 1))
  else
    refusals=0
  fi
done
rm -f "$watched" "$watched.$head"
exec "$(dirname "$0")/../.venv/bin/ray" stop 9>&-
