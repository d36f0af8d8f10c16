for i in 1 2 3 4 5 6; do for w in engine-base engine; do for r in 1 16; do
cd /work/wt/$w; echo $w $(PYTHONPATH=/work/wt/$w timeout 100 .venv/bin/python /work/tmp-engine/step10.py weft/bundled/weft-nano --requests $r --temperature 0.8 --threads 1 2>&1 | tail -1) load $(cut -d' ' -f1 /proc/loadavg)
done; done; done
