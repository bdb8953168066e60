#!/bin/sh
# Start a training on a Vast machine, interruptible at PRICE dollars an hour; outbid, it goes on when it is started again.
# Usage: launch/cloud/vast.sh OFFER IMAGE PRICE DATASET NAME   (OFFER: vastai search offers; IMAGE: launch/Dockerfile's)
# The dataset lies in the instance's /data (vastai copy); so does the run, which `vastai copy` brings home.
set -eu
if [ $# -ne 5 ]; then
  echo "usage: $0 OFFER IMAGE PRICE DATASET NAME" >&2
  exit 2
fi
exec vastai create instance "$1" --image "$2" --bid_price "$3" --disk 100 --label "lora-$5" --ssh --direct \
  --env "-e RUNS=/data/runs" \
  --onstart-cmd "cd /opt/lora-train && until [ -d /data/$4 ]; do sleep 10; done; launch/spot.sh launch/one-gpu.yaml /data/$4 $5 >> /data/spot.log 2>&1"
