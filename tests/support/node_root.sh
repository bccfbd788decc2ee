# Becomes the init of a node: sh -eu node_root.sh ROOT NAME SIZE PREFIX PYTHON HOME
# Runs in fresh network, mount, PID, UTS and IPC namespaces. The node's disk is a tmpfs on ROOT that holds what is listed
# here and nothing else of the host.
#   PREFIX  the node environment (a venv); seen at /opt/node
#   PYTHON  the prefix of its base interpreter; seen at /opt/python, unless it is /usr, which is there anyway
#   HOME    a folder of the host with what belongs to this node: hosts, host key, authorized_keys
root=$1 name=$2 size=$3 prefix=$4 python=$5 home=$6

hostname "$name"
mount -t tmpfs -o "size=$size,mode=755" node "$root"
cd "$root"
mkdir -p dev/pts dev/shm etc home opt/node/bin opt/node/lib proc root run/sshd sys tmp usr var/lib var/log var/spool var/tmp old
chmod 1777 tmp var/tmp && chmod 700 root

ln -s /run var/run
for folder in bin sbin lib lib32 lib64 libx32; do
    if [ -L "/$folder" ]; then ln -s "$(readlink "/$folder")" "$folder"; fi
done
see() { mount --bind "$1" "$2" && mount -o remount,ro,bind "$2"; }
see /usr usr

cp -a /etc/. etc/
rm -rf etc/ssh/ssh_host_* etc/slurm etc/munge etc/mtab etc/resolv.conf etc/hosts etc/hostname
ln -s /proc/self/mounts etc/mtab
: >etc/resolv.conf
echo "hosts: files" >etc/nsswitch.hosts
sed '/^hosts:/d' etc/nsswitch.conf >>etc/nsswitch.hosts
mv etc/nsswitch.hosts etc/nsswitch.conf
cp "$home/hosts" etc/hosts
echo "$name" >etc/hostname
cp "$home/host_key" "$home/host_key.pub" etc/ssh/
chmod 600 etc/ssh/host_key
echo "trainer:x:20001:20001::/home/trainer:/bin/bash" >>etc/passwd
echo "trainer:x:20001:" >>etc/group
echo "trainer:*:19000:0:99999:7:::" >>etc/shadow
for user in root home/trainer; do
    mkdir -p "$user/.ssh"
    cp "$home/authorized_keys" "$user/.ssh/authorized_keys"
    chmod 700 "$user" "$user/.ssh" && chmod 600 "$user/.ssh/authorized_keys"
done
chown -R 20001:20001 home/trainer

for device in null zero full random urandom tty; do
    : >"dev/$device"
    mount --bind "/dev/$device" "dev/$device"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts dev/pts
mount -t tmpfs -o size=256m,mode=1777 shm dev/shm
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
ln -s /proc/self/fd/0 dev/stdin
ln -s /proc/self/fd/1 dev/stdout
ln -s /proc/self/fd/2 dev/stderr
mount -t proc proc proc
mount -t sysfs sysfs sys
if [ -d /sys/fs/cgroup ]; then mount --rbind /sys/fs/cgroup sys/fs/cgroup; fi

see "$prefix/lib" opt/node/lib
ln -s lib opt/node/lib64
base=/usr
if [ "$python" != /usr ]; then
    base=/opt/python
    mkdir opt/python
    see "$python" opt/python
    echo /opt/python/lib >etc/ld.so.conf.d/node-python.conf
fi
version=$(sed -n 's/^version\(_info\)\? *= *\([0-9]*\.[0-9]*\).*/\2/p' "$prefix/pyvenv.cfg")
printf 'home = %s/bin\ninclude-system-site-packages = false\nversion = %s\n' "$base" "$version" >opt/node/pyvenv.cfg
ln -s "$base/bin/python$version" opt/node/bin/python
ln -s python opt/node/bin/python3

pivot_root . old
cd /
umount -l old
rmdir old
if [ "$base" != /usr ]; then ldconfig; fi
ip link set lo up
: >/run/ready
exec /opt/node/bin/python -I -S -c '
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
while True:  # whoever lost its parent is ours to bury
    signal.sigwait({signal.SIGCHLD})
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
'
