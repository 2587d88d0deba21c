//! `lfs osts`, `mdts`, `check` and `pool_list`: the targets in the cluster map.

use std::{ffi::OsString, fmt::Write as _};

use strake_proto::{TargetId, map::MapView};

use super::{
    Failure, Output,
    args::{Opt, parse},
    fs as mount,
};

pub const CHECK_USAGE: &str = "lfs check {mgts|mdts|osts|all|servers} [PATH]\n";
pub const POOL_USAGE: &str = "lfs pool_list FSNAME[.POOL]|PATH\n";
const NO_OPTIONS: &[Opt] = &[];

/// `FSNAME-OST0003_UUID`.
pub fn ost_uuid(fs_name: &str, id: TargetId) -> String {
    format!("{fs_name}-OST{id:04x}_UUID")
}

/// `FSNAME-MDT0000_UUID`. There is one metadata target.
pub fn mdt_uuid(fs_name: &str) -> String {
    format!("{fs_name}-MDT0000_UUID")
}

/// An OST by index, by name or by UUID.
pub fn ost_of(map: &MapView, name: &str) -> Result<TargetId, Failure> {
    let short = name.strip_suffix("_UUID").unwrap_or(name);
    let hex = short.rsplit_once("OST").map(|(_, h)| u32::from_str_radix(h, 16));
    let id = hex.unwrap_or_else(|| short.parse());
    match id {
        Ok(id) if map.target(id).is_some() => Ok(id),
        _ => Err(Failure::new(libc::ENODEV, format!("there is no OST '{name}'"))),
    }
}

fn list(header: &str, lines: impl Iterator<Item = (u32, String, bool)>) -> String {
    let mut s = format!("{header}:\n");
    for (index, uuid, alive) in lines {
        let _ = writeln!(s, "{index}: {uuid} {}", if alive { "ACTIVE" } else { "INACTIVE" });
    }
    s
}

fn osts_text(map: &MapView) -> String {
    let m = &map.map;
    let mut targets: Vec<_> =
        m.targets.iter().map(|t| (t.id, ost_uuid(&m.fs_name, t.id), t.alive)).collect();
    targets.sort();
    list("OBDS", targets.into_iter())
}

pub fn osts(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    for m in mount::chosen(&parse("osts", NO_OPTIONS, args)?.operands, None)? {
        out.print(&osts_text(&mount::map(&m)?));
    }
    Ok(())
}

pub fn mdts(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    for m in mount::chosen(&parse("mdts", NO_OPTIONS, args)?.operands, None)? {
        let map = mount::map(&m)?;
        out.print(&list("MDTS", [(0, mdt_uuid(&map.map.fs_name), true)].into_iter()));
    }
    Ok(())
}

/// Parses arguments as names of OSTs and pools of `map`.
pub fn read(args: Vec<OsString>, map: &MapView) -> Result<(), Failure> {
    let p = parse("pool_list", NO_OPTIONS, args)?;
    osts_text(map);
    for name in &p.operands {
        ost_of(map, &name.to_string_lossy())?;
        pools_text(map, Some(&name.to_string_lossy()))?;
    }
    pools_text(map, None).map(drop)
}

pub fn check(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let mut p = parse("check", NO_OPTIONS, args)?;
    if p.operands.is_empty() {
        return Err(Failure::usage("check", "name what to check".into()));
    }
    let what = p.operands.remove(0);
    let (mdts, osts) = match what.to_str() {
        Some("mds" | "mdts" | "mgts") => (true, false),
        Some("osts") => (false, true),
        Some("all" | "servers") => (true, true),
        _ => {
            return Err(Failure::usage(
                "check",
                format!("cannot check '{}'", what.to_string_lossy()),
            ));
        }
    };
    for m in mount::chosen(&p.operands, None)? {
        let map = mount::map(&m)?;
        // The connection's part of the name, which is a kernel address in Lustre.
        let uuid = &map.map.fs_uuid;
        let by = hex::encode(&uuid[..uuid.len().min(8)]);
        if mdts {
            // This call fails if the metadata server does not answer.
            mount::statfs(&m)?;
            out.print(&format!("{}-MDT0000-mdc-{by} active.\n", map.map.fs_name));
        }
        for t in map.map.targets.iter().filter(|_| osts) {
            let name = format!("{}-OST{:04x}-osc-{by}", map.map.fs_name, t.id);
            if t.alive {
                out.print(&format!("{name} active.\n"));
            } else {
                out.fail(lost(&name));
            }
        }
    }
    Ok(())
}

fn lost(name: &str) -> Failure {
    let errno = libc::ENOTCONN;
    Failure::new(
        errno,
        format!("error: check '{name}': Transport endpoint is not connected ({errno})"),
    )
}

fn pools_text(map: &MapView, pool: Option<&str>) -> Result<String, Failure> {
    let m = &map.map;
    let Some(pool) = pool else {
        let mut s = format!("Pools from {}:\n", m.fs_name);
        for p in &m.pools {
            let _ = writeln!(s, "{}.{}", m.fs_name, p.name);
        }
        return Ok(s);
    };
    let found = m.pools.iter().find(|p| p.name == pool);
    let found = found.ok_or_else(|| {
        Failure::new(libc::ENOENT, format!("pool '{}.{pool}' not found", m.fs_name))
    })?;
    let mut s = format!("Pool: {}.{pool}\n", m.fs_name);
    for t in &found.targets {
        let _ = writeln!(s, "{}", ost_uuid(&m.fs_name, *t));
    }
    Ok(s)
}

pub fn pool_list(args: Vec<OsString>, out: &mut Output) -> Result<(), Failure> {
    let p = parse("pool_list", NO_OPTIONS, args)?;
    let [name] = &p.operands[..] else {
        return Err(Failure::usage("pool_list", "name one file system, pool or path".into()));
    };
    let name = name.to_string_lossy();
    let (fs, pool) = match name.split_once('.') {
        Some((fs, pool)) if !name.contains('/') && !fs.is_empty() => (fs, Some(pool)),
        _ => (&name[..], None),
    };
    let map = mount::map(&mount::by_name_or_path(fs)?)?;
    out.print(&pools_text(&map, pool)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use strake_proto::pb;

    use super::*;

    fn map() -> MapView {
        let targets =
            (0..4).map(|id| pb::Target { id, alive: id != 3, ..Default::default() }).collect();
        let pools = vec![pb::Pool { name: "flash".into(), targets: vec![1, 3] }];
        MapView::new(pb::ClusterMap {
            fs_name: "lustre0".into(),
            targets,
            pools,
            ..Default::default()
        })
        .unwrap()
    }

    #[test]
    fn lists_print_as_lustre_does() {
        assert_eq!(osts_text(&map()), include_str!("../../tests/fixtures/lfs/osts.txt"));
        let two = [(0, mdt_uuid("lustre0"), true), (1, "lustre0-MDT0001_UUID".into(), true)];
        assert_eq!(
            list("MDTS", two.into_iter()),
            include_str!("../../tests/fixtures/lfs/mdts.txt")
        );
        let error = format!("lfs check: {}\n", lost("nas_test-OST0007-osc-ffff99f77f63e800").text);
        assert_eq!(error, include_str!("../../tests/fixtures/lfs/check_error.txt"));
        assert_eq!(pools_text(&map(), None).unwrap(), "Pools from lustre0:\nlustre0.flash\n");
        assert_eq!(
            pools_text(&map(), Some("flash")).unwrap(),
            "Pool: lustre0.flash\nlustre0-OST0001_UUID\nlustre0-OST0003_UUID\n"
        );
        assert_eq!(pools_text(&map(), Some("x")).unwrap_err().code, libc::ENOENT);
    }

    #[test]
    fn osts_have_three_names() {
        for name in ["3", "OST0003", "lustre0-OST0003", "lustre0-OST0003_UUID"] {
            assert_eq!(ost_of(&map(), name).unwrap(), 3, "{name}");
        }
        for name in ["4", "OST", "x", ""] {
            assert!(ost_of(&map(), name).is_err(), "{name}");
        }
    }
}
