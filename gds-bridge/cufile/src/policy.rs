//! `STRAKE_GDS_POLICY`: which tiers the bytes of a file may take, for all mounts (`POLICY`) or for
//! one of them (`PATH=POLICY`), several with commas between.

use std::ffi::OsString;

use rustix::fs::{major, minor};
use strake_gds::Policy;
use strake_mount_table::Mounted;
use strake_proto::{Code, Error, Result};

use crate::{
    abi,
    errors::{CallError, Done, say},
    mount_detection,
    mount_detection::Found,
    set,
};

/// The combined policy for a file. A policy that has no meaning here, or that names no mount, is an
/// error, so that a program never runs with a policy that is not enforced.
pub fn of(file: &Found) -> Done<Policy> {
    let Some(text) = set::os("STRAKE_GDS_POLICY") else { return Ok(Policy::Prefer) };
    let device = (major(file.id.0), minor(file.id.0));
    let bad = |text: OsString| Error::new(Code::Inval, format!("{text:?} is not UTF-8"));
    text.into_string()
        .map_err(bad)
        .and_then(|text| demanded(&text, &mount_detection::mounts(), device))
        .map_err(|e| {
            say(|| format!("STRAKE_GDS_POLICY: {e}"));
            CallError::Op(abi::INVALID_VALUE)
        })
}

fn demanded(text: &str, table: &[Mounted], device: (u32, u32)) -> Result<Policy> {
    let device = format!("{}:{}", device.0, device.1);
    text.split(',').try_fold(Policy::Prefer, |all, one| {
        let one = one.trim();
        let (at, policy) =
            one.rsplit_once('=').map_or((None, one), |(at, policy)| (Some(at), policy));
        let policy = policy.parse::<Policy>()?;
        if let Some(at) = at
            && !devices_at(table, at)?.contains(&&device[..])
        {
            return Ok(all);
        }
        all.and(policy).ok_or_else(|| {
            Error::new(
                Code::Inval,
                format!("`{one}` and {all} apply to the same file, and no tier meets both"),
            )
        })
    })
}

/// The devices of our mounts at a path, from the table of mounts.
fn devices_at<'a>(table: &'a [Mounted], at: &str) -> Result<Vec<&'a str>> {
    let named = if at == "/" { at } else { at.trim_end_matches('/') };
    let ours = |m: &&Mounted| m.kind == mount_detection::KIND && m.at.as_os_str() == named;
    let devices: Vec<&str> = table.iter().filter(ours).map(|m| &m.device[..]).collect();
    if devices.is_empty() {
        return Err(Error::new(Code::Inval, format!("no StrakeFS is mounted at `{at}`")));
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use strake_gds::Tier;

    use super::*;

    const TABLE: &str = "22 28 0:21 / /proc rw shared:5 - proc proc rw\n\
        40 28 0:55 / /mnt/a rw,nosuid - fuse.strake ai rw,user_id=0\n\
        43 28 0:55 /x /bound rw - fuse.strake ai rw,user_id=0\n\
        41 28 0:56 / /mnt/b\\040c\\134d rw - fuse.strake ai rw,user_id=0\n\
        42 28 0:57 / /mnt/other rw - fuse.other x rw,user_id=0\n\
        junk\n";
    const RDMA: Policy = Policy::AtLeast(Tier::BounceRdma);
    const TCP: Policy = Policy::AtLeast(Tier::BounceTcp);

    fn of(text: &str, device: u32) -> Result<Policy> {
        demanded(text, &strake_mount_table::parse(TABLE.as_bytes()), (0, device))
    }

    #[test]
    fn a_policy_holds_for_all_mounts_or_for_the_one_that_is_named() {
        assert_eq!(of("at-least:bounce-tcp", 55).unwrap(), TCP);
        let some = "at-least:bounce-tcp,/mnt/a=at-least:bounce-rdma, /mnt/b c\\d/=require:pageable";
        assert_eq!(of(some, 55).unwrap(), RDMA, "what all have and what it has itself");
        assert!(of(some, 56).unwrap_err().message.contains("no tier meets both"));
        assert_eq!(
            of("/bound=at-least:bounce-rdma", 55).unwrap(),
            RDMA,
            "bound elsewhere, the same file system"
        );
        assert_eq!(of("/mnt/a=at-least:bounce-rdma", 56).unwrap(), Policy::Prefer);
    }

    #[test]
    fn what_would_not_hold_for_anything_is_an_error() {
        for bad in [
            "",
            "fastest",
            "/mnt/a=fastest",
            "/mnt/c=prefer",
            "/mnt/other=prefer",
            "=prefer",
            "prefer,",
            "/mnt/a",
        ] {
            assert_eq!(of(bad, 55).unwrap_err().code, Code::Inval, "{bad}");
        }
    }
}
