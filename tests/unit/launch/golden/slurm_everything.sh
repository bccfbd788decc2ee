#!/bin/bash -l
#SBATCH --job-name=mxdist-train-1a2b-1-1-ba7816bf
#SBATCH --dependency=singleton
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --reservation=spring
#SBATCH --constraint=[rack1|rack2]&ib
#SBATCH --gres=gpu:a100:2
#SBATCH --gpus-per-node=a100:2
#SBATCH --mem=64G
#SBATCH --time=1-02:03:04
#SBATCH --cpus-per-task=8
#SBATCH --exclusive
#SBATCH --signal=B:TERM@70
#SBATCH --no-requeue
#SBATCH --chdir=/
#SBATCH --output=/shared/logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --export=MXDIST_SLURM,AWS_ACCESS_KEY_ID,AWS_SECRET_ACCESS_KEY
export PATH="${PATH:-/usr/local/bin:/usr/bin:/bin}" HOME="${HOME:-$(getent passwd "$(id -u)" | cut -d: -f6)}"
module load cuda/11.2
export NCCL_DEBUG=WARN
exec /opt/mxdist/bin/python -I -c 'import sys;f=open(0,"rb",0,closefd=False);n=int(f.readline() or 0);b=bytearray();[b.extend(f.read(n-len(b)) or sys.exit(75)) for _ in iter(lambda:len(b)<n,False)];exec(compile(bytes(b),"mxdist-bootstrap","exec"))' <<'MXDIST_END'
10
first = 1
14
{"attempt": 1}9
boot = 1
MXDIST_END
