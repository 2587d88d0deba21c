//! The repairs of `strake fsck --repair`. fsck looked at a file system in use, so each repair is
//! done only if the state still agrees: then changes made meanwhile are safe. Inode and data ids
//! are never given out twice, so an id that no inode has now will never be used again.

use strake_proto::{
    Code,
    layout::{EOF, MAX_STRIPES, STRIPE_UNIT, StripeMap},
    map::MapView,
    pb,
};

use super::{
    fail::{Res, fail},
    gc,
    inode::{Inode, S_IFDIR, is_dir, is_file},
    keys,
    txn::{Spot, Txn},
};
use pb::repair::What;

pub(super) fn repair(t: &mut Txn<'_>, r: &pb::Repair) -> Res<()> {
    match &r.what {
        Some(What::Chunks(c)) => chunks(t, c),
        Some(What::End(e)) => end(t, e),
        Some(What::Name(n)) => name(t, n),
        None => fail(Code::OpNotSupp, "this metadata server does not know the repair; upgrade it"),
    }
}

/// Puts chunks on the list of chunks to delete. Doing so twice is harmless: they are deleted twice.
fn chunks(t: &mut Txn<'_>, c: &pb::RepairChunks) -> Res<()> {
    if c.ino >= t.header.next_ino || c.data_id >= t.header.next_data_id {
        // A file made before the deletion could get this id. It means that this state is not the
        // newest there was.
        let m = format!(
            "inode {:#x}, data {:#x} were not assigned yet in this state",
            c.ino, c.data_id
        );
        return fail(Code::Inval, m);
    }
    if c.chains.is_empty() || c.chains.len() > MAX_STRIPES {
        return fail(
            Code::Inval,
            format!("{} chains; 1 to {MAX_STRIPES} are possible", c.chains.len()),
        );
    }
    let view = t.place.view.clone();
    if let Some(id) = c.chains.iter().find(|id| view.chain(**id).is_none()) {
        return fail(Code::Inval, format!("there is no chain {id}"));
    }
    let own = own_chains(t, c, &view)?;
    if let Some(id) = own.iter().find(|id| !c.misplaced || c.chains.contains(id)) {
        return fail(
            Code::Exist,
            format!("inode {:#x} exists and has its chunks on chain {id}", c.ino),
        );
    }
    let component = pb::Component {
        end: EOF,
        stripe_size: STRIPE_UNIT,
        copies: 1,
        data_id: c.data_id,
        chains: c.chains.clone(),
        ..Default::default()
    };
    let layout = Some(pb::Layout { generation: 0, components: vec![component], drafts: 0 });
    gc::discard(t, pb::GcRecord { ino: c.ino, layout, size: 0 })
}

/// The chains on which the file with these chunks keeps them; empty: there is no such file.
fn own_chains(t: &Txn<'_>, c: &pb::RepairChunks, view: &MapView) -> Res<Vec<u32>> {
    let layout = t.inode(c.ino)?.and_then(|r| r.layout);
    match layout.filter(|l| l.components.iter().any(|x| x.data_id == c.data_id)) {
        Some(l) => Ok(StripeMap::resolve(c.ino, &l, view)?.chains),
        None => Ok(Vec::new()),
    }
}

/// Trims everything beyond a file's current end.
fn end(t: &mut Txn<'_>, e: &pb::RepairEnd) -> Res<()> {
    let mut r = t.need(e.ino)?;
    if !is_file(r.attr()) || r.layout.is_none() || r.attr().data_id != e.data_id {
        return fail(
            Code::NoEnt,
            format!("inode {:#x} is not (or no longer) a file with data {:#x}", e.ino, e.data_id),
        );
    }
    if r.attr().size != e.size {
        return fail(Code::Busy, format!("the file has {} bytes now", r.attr().size));
    }
    if r.writers > 0 {
        return fail(Code::Busy, "the file is open for writing");
    }
    if r.seal.is_some() {
        return fail(Code::Busy, "the file is sealed, or being sealed");
    }
    gc::cut(t, &mut r, e.size)?;
    t.put_unseen(e.ino, r);
    Ok(())
}

fn name(t: &mut Txn<'_>, n: &pb::RepairName) -> Res<()> {
    let mut dir = t.need(n.parent)?;
    if !is_dir(dir.attr()) {
        return fail(Code::NotDir, format!("inode {:#x} is not a directory", n.parent));
    }
    if t.inode(n.ino)?.is_some() {
        return fail(Code::Exist, format!("inode {:#x} exists", n.ino));
    }
    let (cookie, entry) = match t.find(n.parent, &n.name)? {
        Spot::Taken(cookie, d) if d.ino == n.ino => (cookie, d),
        _ => return fail(Code::NoEnt, "the name is gone, or belongs to another inode now"),
    };
    // A directory's names are stored under its number: without this entry nothing would lead to
    // them.
    let below = !t.scan(&keys::dentry(n.ino, 0)[..9], &[], |_, value| Ok(value.is_empty()))?;
    if below {
        return fail(
            Code::NotEmpty,
            "its inode does not exist, but names below it do: only this entry leads to them",
        );
    }
    t.remove_name(n.parent, cookie)?;
    dir.entries = dir.entries.saturating_sub(1);
    let (subdir, now) = (entry.r#type == S_IFDIR >> 12, t.now());
    let a = dir.attr_mut();
    a.nlink = a.nlink.saturating_sub(subdir.into());
    (a.mtime_ns, a.ctime_ns, a.change) = (now, now, a.change.saturating_add(1));
    t.put_inode(n.parent, dir);
    Ok(())
}
