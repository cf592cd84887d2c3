# branch: d/lead minutes: 9 gpu: no
sleep 120
timeout 420 python3 tests/planted_faults.py missing-wait early-release missing-proxy-fence swapped-stage missing-wait-for-O TMEM-released-early wrong-phase list-bits-off-by-one decode-last-block append-last-page combine-unscaled-total mask-bits-last-warp short-dS-overwritten token-list-place --seeds 1 --jobs 4 --workers 2 > $OUT/faults.txt 2>&1
tail -25 $OUT/faults.txt | cut -c1-200
