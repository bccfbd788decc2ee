#!/bin/bash -l
#SBATCH --job-name=mxdist-train-1a2b-1-1-ba7816bf
#SBATCH --dependency=singleton
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --signal=B:TERM@70
#SBATCH --requeue
#SBATCH --chdir=/
#SBATCH --output=/tmp/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --export=MXDIST_SLURM
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" HOME="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}"
exec /opt/mxdist/bin/python -I -c 'import sys;f=open(0,"rb",0,closefd=False);n=int(f.readline() or 0);b=bytearray();[b.extend(f.read(n-len(b)) or sys.exit(75)) for _ in iter(lambda:len(b)<n,False)];exec(compile(bytes(b),"mxdist-bootstrap","exec"))' <<'MXDIST_END'
10
first = 1
14
{"attempt": 1}9
boot = 1
MXDIST_END
