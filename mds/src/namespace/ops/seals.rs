//! Sealed files: immutable, with a manifest of their contents. See `docs/seal.md`.
//!
//! The inode records that the file is sealed, with the manifest's sums; the digests of its extents
//! are in pages, which are separate records. [`perm::changeable`] enforces immutability; every
//! operation that changes something calls it.

use strake_proto::{
    Code, pb,
    seal::{DIGEST, digests_in, extent_size, pages},
};

use super::run::Run;
use crate::namespace::{
    caller::{is_root, owns},
    effects::Ending,
    fail::{Res, fail},
    format::FORMAT_SEALED,
    gc,
    inode::{Inode, is_file, shown},
    keys,
    perm::{self, R},
    removal::forget_pages,
    writers,
};
use pb::seal::Step;

/// A result that shows an inode and how it is sealed.
fn told(r: &pb::InodeRecord) -> pb::OpResult {
    pb::OpResult { seal: r.seal.clone(), ..shown(r) }
}

/// A manifest could be used to guess at the contents: only callers who may read those get it.
pub(super) fn get_seal(run: &mut Run<'_, '_>, o: &pb::GetSeal) -> Res<pb::OpResult> {
    let r = run.inode(o.ino)?;
    perm::check(run.by.creds, &r, R)?;
    if r.seal.is_none() {
        return fail(Code::NoData, "the file is not sealed");
    }
    let ino = r.attr().ino;
    let data = match o.page {
        None => Default::default(),
        Some(n) => match run.t.get(&keys::extents(ino, n))? {
            Some(digests) => digests,
            None => return fail(Code::NoData, format!("the manifest has no page {n}")),
        },
    };
    Ok(pb::OpResult { ino, seal: r.seal, data, ..Default::default() })
}

pub(super) fn seal(run: &mut Run<'_, '_>, o: &pb::Seal) -> Res<pb::OpResult> {
    let r = run.inode(o.ino)?;
    if !owns(run.by.creds, r.attr()) {
        return fail(Code::Perm, "only the owner and root may seal a file");
    }
    match &o.step {
        Some(Step::Begin(_)) => begin_seal(run, r),
        Some(Step::Page(page)) => add_page(run, r, o.id, page),
        Some(Step::Finish(manifest)) => finish_seal(run, r, o.id, manifest),
        Some(Step::Undo(_)) => undo_seal(run, r, o.id),
        None => fail(Code::OpNotSupp, "this metadata server does not know the step; upgrade it"),
    }
}

fn begin_seal(run: &mut Run<'_, '_>, mut r: pb::InodeRecord) -> Res<pb::OpResult> {
    if !is_file(r.attr()) {
        return fail(Code::Inval, "only regular files can be sealed");
    }
    if r.seal.is_some() {
        return Ok(told(&r));
    }
    if r.attr().nlink == 0 {
        return fail(Code::NoEnt, "the file has no name (any more)");
    }
    if r.writers > 0 {
        return fail(
            Code::Busy,
            format!("the file is open for writing by {} client(s); close it there", r.writers),
        );
    }
    if r.trim.is_some() {
        return fail(
            Code::Busy,
            "bytes beyond the end of the file are still being removed; try again",
        );
    }
    // No session is recorded as a writer; this ends rights that were given out nevertheless.
    let ino = r.attr().ino;
    run.t.notes.endings.push(Ending { session: 0, ino, rights: writers::TO_WRITE });
    let id = gc::number(run.t)?;
    r.seal = Some(pb::SealInfo { id, ..Default::default() });
    let version = &mut run.t.header.format_version;
    *version = (*version).max(FORMAT_SEALED);
    Ok(told(&run.save(r)))
}

fn add_page(
    run: &mut Run<'_, '_>,
    mut r: pb::InodeRecord,
    id: u64,
    page: &pb::SealPage,
) -> Res<pb::OpResult> {
    let (ino, size) = (r.attr().ino, r.attr().size);
    // If two runs compute the same manifest, the slower one repeats what the other did.
    let is_known = r
        .seal
        .as_ref()
        .is_some_and(|s| s.id == id && s.manifest.is_some() && page.number < s.pages);
    if is_known
        && run.t.get(&keys::extents(ino, page.number))?.is_some_and(|have| have == page.digests)
    {
        return Ok(told(&r));
    }
    let seal = unfinished(&mut r, id)?;
    let digests = digests_in(size, page.number);
    if digests == 0 || page.digests.len() != digests * DIGEST {
        let m = format!(
            "page {} of this manifest has {digests} digests of {DIGEST} bytes",
            page.number
        );
        return fail(Code::Inval, m);
    }
    if page.number > seal.pages {
        return fail(Code::Inval, format!("page {} before page {}", page.number, seal.pages));
    }
    seal.pages = seal.pages.max(page.number + 1);
    run.t.put(keys::extents(ino, page.number), page.digests.clone());
    run.t.put_inode(ino, r.clone());
    Ok(told(&r))
}

fn finish_seal(
    run: &mut Run<'_, '_>,
    mut r: pb::InodeRecord,
    id: u64,
    manifest: &pb::Manifest,
) -> Res<pb::OpResult> {
    let (size, now) = (r.attr().size, run.t.now());
    let timeless = |m: &pb::Manifest| pb::Manifest { time_ns: 0, ..m.clone() };
    if let Some(pb::SealInfo { id: own, manifest: Some(m), .. }) = &r.seal
        && *own == id
        && timeless(m) == timeless(manifest)
    {
        return Ok(told(&r));
    }
    let seal = unfinished(&mut r, id)?;
    if manifest.size != size || manifest.extent_size != extent_size(size) {
        let m = format!(
            "the file has {size} bytes, in extents of {}; its manifest disagrees",
            extent_size(size)
        );
        return fail(Code::Inval, m);
    }
    if manifest.sha256.len() != DIGEST || manifest.root.len() != DIGEST {
        return fail(Code::Inval, format!("SHA-256 and root of a manifest have {DIGEST} bytes"));
    }
    if seal.pages != pages(size) {
        return fail(
            Code::Inval,
            format!("{} of {} pages of the manifest are there", seal.pages, pages(size)),
        );
    }
    seal.manifest = Some(pb::Manifest { time_ns: now, ..manifest.clone() });
    Ok(told(&run.save(r)))
}

/// `id`: that of a seal that was begun and could not be completed; 0 for any seal.
fn undo_seal(run: &mut Run<'_, '_>, mut r: pb::InodeRecord, id: u64) -> Res<pb::OpResult> {
    let Some(seal) = &r.seal else { return fail(Code::NoData, "the file is not sealed") };
    if id != 0 && (seal.id != id || seal.manifest.is_some()) {
        return fail(Code::Stale, "the seal was undone meanwhile, or another run completed it");
    }
    // An unfinished seal may be undone by non-root callers: one that cannot read the whole file
    // must be able to go back.
    if seal.manifest.is_some() && !is_root(run.by.creds) {
        return fail(Code::Perm, "only root may undo a seal");
    }
    forget_pages(run.t, &r);
    r.seal = None;
    Ok(told(&run.save(r)))
}

/// The seal that is to get its manifest.
fn unfinished(r: &mut pb::InodeRecord, id: u64) -> Res<&mut pb::SealInfo> {
    match &mut r.seal {
        Some(s) if s.id != id => fail(Code::Stale, "the seal was undone meanwhile"),
        Some(s) if s.manifest.is_some() => fail(Code::Exist, "the file has a manifest"),
        Some(s) => Ok(s),
        None => fail(Code::Stale, "the seal was undone meanwhile"),
    }
}
