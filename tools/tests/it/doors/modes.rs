//! What other users of the machine can read and reach, whatever umask everything was started under.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, PermissionsExt},
    path::{Path, PathBuf},
    process::Command,
};

use super::{Doors, can_mount};
use crate::common::{ok, strake, text};

/// Everything that other users have any permission for: the folder itself and what is below it, but
/// nothing below `but`.
fn open_to_others(folder: &Path, but: &Path, found: &mut Vec<(PathBuf, u32)>) {
    let meta = folder.symlink_metadata().unwrap();
    let mode = meta.permissions().mode();
    if !meta.file_type().is_symlink() && !meta.file_type().is_socket() && mode & 0o077 != 0 {
        found.push((folder.into(), mode & 0o7777));
    }
    if meta.is_dir() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path != but {
                open_to_others(&path, but, found);
            }
        }
    }
}

fn open_in(folder: &Path, but: &Path) -> Vec<(PathBuf, u32)> {
    let mut found = Vec::new();
    open_to_others(folder, but, &mut found);
    found
}

fn as_nobody(command: &str) -> std::process::Output {
    Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "sh", "-c", command])
        .output()
        .unwrap()
}

#[test]
fn modes_are_private_whatever_the_umask_is() {
    if !can_mount() {
        return;
    }
    for umask in ["000", "022"] {
        let c = Doors::new();
        let (mnt, second, run) =
            (c.root.path().join("mnt"), c.root.path().join("m2"), c.root.path().join("run"));
        c.up(umask, "1", &mnt);
        fs::write(mnt.join("secret"), "x".repeat(100_000)).unwrap();
        fs::create_dir(&second).unwrap();
        let mut mount = Command::new("sh");
        let options = format!("run_dir={},retry=0", run.display());
        mount.args([
            "-c",
            "umask $0 && exec \"$@\"",
            umask,
            env!("CARGO_BIN_EXE_strake"),
            "mount",
            "--client-key",
        ]);
        mount
            .arg(c.key("client.key"))
            .arg(format!("{}:/", c.endpoint("mds1")))
            .arg(&second)
            .args(["-o", &options]);
        ok(&mount.output().unwrap());
        let found = [open_in(&c.dir(), &mnt), open_in(&run, &mnt)].concat();
        let files = fs::read_dir(&run).unwrap().map(|e| e.unwrap().path()).collect::<Vec<_>>();
        assert!(files.iter().any(|f| f.extension().is_some_and(|e| e == "client")), "{files:?}");
        ok(&strake().arg("umount").arg(&second).output().unwrap());
        assert!(found.is_empty(), "umask {umask}: {found:?}");
    }
}

#[test]
fn modes_of_a_former_version_are_mended_at_the_start() {
    let c = Doors::new();
    c.up("022", "1", Path::new("none"));
    ok(&c.run(&["down"]));
    let others = Command::new("chmod").args(["-R", "go+rwX"]).arg(c.dir()).status().unwrap();
    assert!(others.success());
    for key in ["cluster.key", "client.key"] {
        fs::set_permissions(c.key(key), fs::Permissions::from_mode(0o600)).unwrap();
    }
    let said = text(&c.up("000", "1", Path::new("none")).stderr);
    assert!(said.contains("other users could read"), "{said}");
    let found = open_in(&c.dir(), Path::new("/none"));
    assert!(found.is_empty(), "{found:?}");
    for server in ["mds1", "oss1", "oss2"] {
        let log = fs::read_to_string(c.dir().join("logs").join(format!("{server}.log"))).unwrap();
        assert_eq!(log.matches("other users could read or reach").count(), 1, "{server}: {log}");
    }
    ok(&c.run(&["down"]));
    let said = text(&c.up("000", "1", Path::new("none")).stderr);
    assert!(!said.contains("other users could read"), "nothing is left to do: {said}");
}

#[test]
fn modes_leave_the_mount_to_its_users() {
    if !can_mount() || !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    // In the cluster's folder other users may pass through to the mount, but not open anything.
    let c = Doors::new();
    let mnt = c.dir().join("mnt");
    c.up("022", "1", &mnt);
    fs::write(mnt.join("public"), "for all\n").unwrap();
    fs::set_permissions(mnt.join("public"), fs::Permissions::from_mode(0o644)).unwrap();
    let read = as_nobody(&format!("cat {}/public", mnt.display()));
    assert_eq!(text(&read.stdout), "for all\n", "{}", text(&read.stderr));
    for what in [
        "ls .",
        "ls oss1",
        "cat oss1/target0/data",
        "cat logs/mds1.log",
        "ls mds1/log",
        "cat client.key",
    ] {
        let out = as_nobody(&format!("cd {} && {what}", c.dir().display()));
        assert!(!out.status.success() && text(&out.stderr).contains("denied"), "{what}: {out:?}");
    }
    let found = open_in(&c.dir(), &mnt);
    assert_eq!(found, [(c.dir(), 0o711)]);
}

#[test]
fn a_set_id_file_counts_on_no_mount_that_does_not_ask_for_it() {
    if !can_mount() || !rustix::process::geteuid().is_root() {
        println!("skipped: not root");
        return;
    }
    let c = Doors::new();
    let (mnt, second) = (c.root.path().join("mnt"), c.root.path().join("m2"));
    c.up("022", "1", &mnt);
    fs::create_dir(&second).unwrap();
    fs::copy("/usr/bin/id", mnt.join("rootid")).unwrap();
    fs::set_permissions(mnt.join("rootid"), fs::Permissions::from_mode(0o4755)).unwrap();
    ok(&Command::new("mknod")
        .arg(mnt.join("null"))
        .args(["c", "1", "3", "-m", "666"])
        .output()
        .unwrap());
    // Mounts as mount(8) does.
    let helper = c.root.path().join("mount.strake");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_strake"), &helper).unwrap();
    let run = c.root.path().join("run");
    for (more, uid, opened) in [("", "65534", false), (",allow_suid,allow_dev", "0", true)] {
        let options = format!(
            "rw,key_file={},run_dir={}{more}",
            c.key("client.key").display(),
            run.display()
        );
        let at = format!("{}:/", c.endpoint("mds1").replace("tcp:", ""));
        ok(&Command::new(&helper).arg(at).arg(&second).args(["-o", &options]).output().unwrap());
        let id = as_nobody(&format!("{}/rootid -u", second.display()));
        let device = as_nobody(&format!("echo x >{}/null", second.display()));
        ok(&strake().arg("umount").arg(&second).output().unwrap());
        assert_eq!(text(&id.stdout).trim(), uid, "'{more}': {}", text(&id.stderr));
        assert_eq!(device.status.success(), opened, "'{more}': {}", text(&device.stderr));
    }
}
