#!/bin/bash
mkdir -p /app/out/cache
python3 -c 'print(sum(n * n for n in range(10)))' > /app/out/sum.txt
printf '#!/bin/sh\necho ran\n' > /app/out/run
chmod +x /app/out/run
touch /app/out/x.tmp /app/out/cache/big
ln -s sum.txt /app/out/latest
