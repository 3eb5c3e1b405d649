#!/bin/bash
# Submits the coordinator, and nodes that begin once it does. To end everything before its time:
#     scancel --name={{coordinator_name}}; scancel --name={{nodes_name}}
set -e
cd "$(dirname "$0")"
pool=$(sbatch --parsable coordinator.sbatch)
sbatch --dependency=after:"${pool%%;*}" --kill-on-invalid-dep=yes nodes.sbatch
