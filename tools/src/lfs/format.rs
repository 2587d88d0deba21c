//! Prints layouts: Lustre's text, byte for byte. Pure functions over plain values.

use std::{collections::BTreeSet, fmt::Write as _};

use strake_proto::{
    Fid, Ino, Result, TargetId,
    ids::TARGET_UNASSIGNED,
    layout::{DEFAULT_STRIPE_SIZE, StripeMap},
    map::{ChainExt, MapView},
    pb,
};

/// Lustre's magic of a layout without and with a pool.
const MAGIC_V1: u32 = 0x0BD1_0BD0;
const MAGIC_V3: u32 = 0x0BD3_0BD0;

/// A stripe's object: the OST of its chain and the id of the file's bytes there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Object {
    pub ost: u32,
    pub id: u64,
    pub group: u64,
    /// The OSTs with copies of it, this one first. Copies that are still being made count.
    pub copies: Vec<TargetId>,
}

/// A plain layout for printing: of a file, or of a directory's default (then without objects).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plain {
    pub fid: Fid,
    /// -1: all OSTs.
    pub stripe_count: i64,
    pub stripe_size: u64,
    pub overstriped: bool,
    pub generation: u32,
    /// -1: chosen when a file is created.
    pub stripe_offset: i64,
    pub pool: String,
    /// Copies of each stripe; 0: not set.
    pub copies: u32,
    pub objects: Vec<Object>,
    pub directory: bool,
}

/// Which fields to print.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fields {
    pub path: bool,
    pub detail: bool,
    pub count: bool,
    pub size: bool,
    pub pattern: bool,
    pub generation: bool,
    pub offset: bool,
    pub pool: bool,
    pub objects: bool,
    pub fid: bool,
    pub yaml: bool,
    pub hex: bool,
    /// How many copies there are, and where. Lustre's text has no such field.
    pub copies: bool,
}

impl Fields {
    pub const DEFAULT: Fields = Fields {
        path: true,
        detail: false,
        count: true,
        size: true,
        pattern: true,
        generation: true,
        offset: true,
        pool: true,
        objects: true,
        fid: false,
        yaml: false,
        hex: false,
        copies: false,
    };

    /// Whether exactly one field is set: then only its value is printed.
    pub fn single(&self) -> bool {
        let on = [
            self.count,
            self.size,
            self.pattern,
            self.generation,
            self.offset,
            self.pool,
            self.objects,
            self.fid,
            self.copies,
        ];
        on.iter().filter(|f| **f).count() == 1 && !self.objects && !self.detail
    }
}

impl Plain {
    /// A file's layout with its OSTs. Composite layouts are `EOPNOTSUPP`.
    pub fn of_file(ino: Ino, layout: &pb::Layout, map: &MapView) -> Result<Plain> {
        let stripes = StripeMap::resolve(ino, layout, map)?;
        let c = &layout.components[0];
        let ost = |id: &u32| map.chain(*id).map_or(TARGET_UNASSIGNED, pb::Chain::ost_index);
        let objects: Vec<Object> = stripes
            .chains
            .iter()
            .map(|c| Object {
                ost: ost(c),
                id: stripes.data,
                group: 0,
                copies: map.chain(*c).map_or_else(Vec::new, copies_of),
            })
            .collect();
        let distinct: BTreeSet<TargetId> = objects.iter().map(|o| o.ost).collect();
        Ok(Plain {
            fid: Fid::from_ino(ino),
            stripe_count: objects.len() as i64,
            stripe_size: stripes.stripe_size,
            overstriped: distinct.len() < objects.len(),
            generation: layout.generation.saturating_sub(layout.drafts),
            stripe_offset: objects.first().map_or(-1, |o| i64::from(o.ost)),
            pool: c.pool.clone(),
            copies: c.copies,
            objects,
            directory: false,
        })
    }

    /// A directory's own default. `raw` shows values that were not set as 0, otherwise as the file
    /// system's default.
    pub fn of_default(ino: Ino, spec: &pb::LayoutSpec, raw: bool) -> Plain {
        let count = match (spec.overstripe, spec.targets.len()) {
            (0, 0) => i64::from(spec.stripe_count),
            (0, n) => n as i64,
            (o, _) => i64::from(o),
        };
        let size = u64::from(spec.stripe_size);
        let start = spec.start.or(spec.targets.first().copied());
        Plain {
            fid: Fid::from_ino(ino),
            stripe_count: if count == 0 && !raw { 1 } else { count },
            stripe_size: if size == 0 && !raw { u64::from(DEFAULT_STRIPE_SIZE) } else { size },
            overstriped: spec.overstripe != 0,
            generation: 0,
            stripe_offset: start.map_or(-1, i64::from),
            pool: spec.pool.clone(),
            copies: spec.copies,
            objects: Vec::new(),
            directory: true,
        }
    }

    /// The layout that a directory without a default of its own passes on.
    pub fn of_effective(ino: Ino, layout: &pb::Layout) -> Plain {
        let c = layout.components.first().cloned().unwrap_or_default();
        let count = c.set.as_ref().map_or(c.chains.len() as u32, |s| s.count).max(1);
        let spec = pb::LayoutSpec {
            stripe_size: c.stripe_size,
            stripe_count: i32::try_from(count).unwrap_or(-1),
            copies: c.copies,
            pool: c.pool,
            ..Default::default()
        };
        Plain::of_default(ino, &spec, false)
    }

    pub fn pattern(&self) -> &'static str {
        if self.overstriped { "raid0,overstriped" } else { "raid0" }
    }

    fn offset(&self, hex: bool) -> String {
        if hex && self.stripe_offset >= 0 {
            format!("{:#x}", self.stripe_offset)
        } else {
            self.stripe_offset.to_string()
        }
    }
}

/// The OSTs with replicas of a chain, its own first.
fn copies_of(c: &pb::Chain) -> Vec<TargetId> {
    let own = c.ost_index();
    let mut all: Vec<TargetId> = c.replicas.iter().map(|r| r.target).collect();
    all.sort_by_key(|t| *t != own);
    all
}

/// The whole text of one file or directory. `only` marks the objects on that OST.
pub fn layout(path: &str, p: &Plain, f: Fields, only: Option<TargetId>) -> String {
    let mut s = String::new();
    if f.path && !f.yaml && !(p.directory && f.objects && !f.count) {
        let _ = writeln!(s, "{path}");
    }
    if f.single() {
        single(&mut s, p, f);
        return s;
    }
    if f.detail && !p.directory {
        let magic = if p.pool.is_empty() { MAGIC_V1 } else { MAGIC_V3 };
        let _ = writeln!(s, "lmm_magic:         0x{magic:08X}");
        let _ = writeln!(s, "lmm_seq:           {:#x}", p.fid.seq);
        let _ = writeln!(s, "lmm_object_id:     {:#x}", p.fid.oid);
    }
    let mut lines: Vec<(&str, String)> = Vec::new();
    let mut line = |on: bool, label: &'static str, value: String| {
        if on {
            lines.push((label, value));
        }
    };
    line((f.detail || f.fid) && !p.directory, "fid:           ", p.fid.to_string());
    line(f.count, "stripe_count:  ", p.stripe_count.to_string());
    line(f.size, "stripe_size:   ", p.stripe_size.to_string());
    line(f.pattern, "pattern:       ", p.pattern().into());
    line(f.generation && !p.directory, "layout_gen:    ", p.generation.to_string());
    line(f.offset, "stripe_offset: ", p.offset(f.hex));
    line(f.pool && !p.pool.is_empty(), "pool:          ", p.pool.clone());
    line(f.copies, "copies:        ", p.copies.to_string());
    if p.directory {
        // One line, fields separated by a blank.
        let joined: Vec<String> =
            lines.iter().map(|(label, value)| format!("{label}{value}")).collect();
        if !joined.is_empty() {
            let _ = writeln!(s, "{}", joined.join(" "));
        }
        return s;
    }
    for (label, value) in lines {
        let _ = writeln!(s, "lmm_{label}{value}");
    }
    if f.objects {
        objects(&mut s, p, f, only);
    }
    s
}

fn single(s: &mut String, p: &Plain, f: Fields) {
    let value = if f.count {
        p.stripe_count.to_string()
    } else if f.size {
        p.stripe_size.to_string()
    } else if f.pattern {
        p.pattern().into()
    } else if f.generation {
        p.generation.to_string()
    } else if f.offset {
        p.offset(f.hex)
    } else if f.pool {
        p.pool.clone()
    } else if f.copies {
        p.copies.to_string()
    } else {
        p.fid.to_string()
    };
    let _ = writeln!(s, "{value}");
}

fn objects(s: &mut String, p: &Plain, f: Fields, only: Option<TargetId>) {
    if f.yaml {
        s.push_str("lmm_objects:\n");
        for o in &p.objects {
            let fid = object_fid(o);
            let _ = writeln!(s, "      - l_ost_idx: {}", o.ost);
            let _ = writeln!(s, "        l_fid:     {:#x}:{:#x}:{:#x}", fid.seq, fid.oid, fid.ver);
            if f.copies {
                let _ = writeln!(s, "        l_copies:  [{}]", list(&o.copies, ", "));
            }
        }
        s.push('\n');
        return;
    }
    let copies = if f.copies { "\t copies" } else { "" };
    let _ = writeln!(s, "\tobdidx\t\t objid\t\t objid\t\t group{copies}");
    for o in &p.objects {
        let index = if f.hex { format!("{:#6x}", o.ost) } else { format!("{:6}", o.ost) };
        let group = if o.group == 0 { format!("{:14}", 0) } else { format!("{:#14x}", o.group) };
        let mark = if only == Some(o.ost) { " *" } else { "" };
        let copies = if f.copies { format!("\t {}", list(&o.copies, ",")) } else { String::new() };
        let _ = writeln!(s, "\t{index}\t{:14}\t{:#13x}\t{group}{copies}{mark}", o.id, o.id);
    }
    s.push('\n');
}

fn list(targets: &[TargetId], between: &str) -> String {
    targets.iter().map(TargetId::to_string).collect::<Vec<_>>().join(between)
}

/// An object's FID in Lustre's form for objects of group 0: the sequence contains the OST, the oid
/// is the low half of the id.
fn object_fid(o: &Object) -> Fid {
    Fid {
        seq: 0x1_0000_0000 | u64::from(o.ost) << 16 | (o.id >> 32 & 0xffff),
        oid: o.id as u32,
        ver: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(offset: i64, size: u64, pool: &str, objects: &[(u32, u64, u64)]) -> Plain {
        Plain {
            fid: Fid { seq: 0x2_0000_0404, oid: 5, ver: 0 },
            stripe_count: objects.len() as i64,
            stripe_size: size,
            overstriped: false,
            generation: 0,
            stripe_offset: offset,
            pool: pool.into(),
            copies: 2,
            objects: objects
                .iter()
                .map(|&(ost, id, group)| Object { ost, id, group, copies: vec![ost, 9] })
                .collect(),
            directory: false,
        }
    }

    fn default_of(count: i32, size: u32) -> Plain {
        Plain::of_default(
            2,
            &pb::LayoutSpec { stripe_count: count, stripe_size: size, ..Default::default() },
            false,
        )
    }

    macro_rules! fixture {
        ($name:literal) => {
            include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lfs/", $name))
        };
    }

    #[test]
    fn files_print_as_lustre_does() {
        let f = Fields::DEFAULT;
        let one = file(0, 1 << 20, "", &[(0, 2, 0)]);
        assert_eq!(layout("testfile", &one, f, None), fixture!("getstripe_one.txt"));
        let pool = file(0, 131_072, "pooltest", &[(0, 2567, 0), (1, 2502, 0)]);
        assert_eq!(
            layout("/mnt/lustre/testfile.bin", &pool, f, None),
            fixture!("getstripe_two_pool.txt")
        );
        let groups = [
            (5, 157_834_736, 0xa_c000_0400),
            (3, 158_138_579, 0xb_4000_0400),
            (43, 158_987_015, 0x10_4000_0400),
            (57, 161_523_633, 0x11_8000_0400),
        ];
        let groups = file(5, 1 << 20, "", &groups);
        assert_eq!(
            layout("./sod_hdf5_chk_0000", &groups, f, None),
            fixture!("getstripe_groups.txt")
        );
        let detail = Fields { detail: true, ..f };
        let hello = file(1, 4 << 20, "", &[(1, 4, 0x2_8000_0400)]);
        assert_eq!(
            layout("/mnt/lustre/ldiskfs/hello", &hello, detail, None),
            fixture!("getstripe_verbose.txt")
        );
    }

    #[test]
    fn directories_print_as_lustre_does() {
        let f = Fields::DEFAULT;
        let listing = layout("striping_example/", &default_of(1, 1 << 20), f, None)
            + &layout(
                "striping_example//example_file",
                &file(2, 1 << 20, "", &[(2, 3_714_477, 0x3_0000_0400)]),
                f,
                None,
            );
        assert_eq!(listing, fixture!("getstripe_dir.txt"));
        let alone = Fields { path: false, ..f };
        assert_eq!(
            layout("d", &default_of(128, 1 << 20), alone, None),
            fixture!("getstripe_dir_default.txt")
        );
        let unset = layout("d", &default_of(0, 0), alone, None);
        assert_eq!(
            unset,
            "stripe_count:  1 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1\n"
        );
        let spec = pb::LayoutSpec { pool: "flash".into(), start: Some(3), ..Default::default() };
        let raw = layout("d", &Plain::of_default(2, &spec, true), alone, None);
        assert_eq!(
            raw,
            "stripe_count:  0 stripe_size:   0 pattern:       raid0 stripe_offset: 3 pool:          flash\n"
        );
    }

    #[test]
    fn single_fields_are_bare_values() {
        let p = file(7, 65_536, "x", &[(7, 9, 0), (8, 9, 0)]);
        let none = Fields::default();
        for (f, want) in [
            (Fields { count: true, ..none }, "2\n"),
            (Fields { size: true, ..none }, "65536\n"),
            (Fields { offset: true, ..none }, "7\n"),
            (Fields { offset: true, hex: true, ..none }, "0x7\n"),
            (Fields { pool: true, ..none }, "x\n"),
            (Fields { pattern: true, ..none }, "raid0\n"),
            (Fields { generation: true, ..none }, "0\n"),
            (Fields { fid: true, ..none }, "[0x200000404:0x5:0x0]\n"),
            (
                Fields { count: true, size: true, ..none },
                "lmm_stripe_count:  2\nlmm_stripe_size:   65536\n",
            ),
        ] {
            assert_eq!(layout("f", &p, f, None), want, "{f:?}");
        }
        assert_eq!(layout("f", &p, Fields { copies: true, ..none }, None), "2\n");
        let marked = layout("f", &p, Fields { objects: true, ..none }, Some(8));
        assert!(marked.contains("             9\t          0x9\t             0 *\n"), "{marked}");
    }

    #[test]
    fn copies_are_shown_where_asked_for() {
        let p = file(7, 65_536, "", &[(7, 9, 0), (8, 9, 0)]);
        let f = Fields { copies: true, ..Fields::DEFAULT };
        let plain = layout("f", &p, Fields::DEFAULT, None);
        let text = layout("f", &p, f, None);
        let head = "\tobdidx\t\t objid\t\t objid\t\t group\t copies\n\t     7\t";
        assert!(text.contains("lmm_copies:        2\n") && text.contains(head), "{text}");
        assert!(text.ends_with("\t             0\t 7,9\n\t     8\t             9\t          0x9\t             0\t 8,9\n\n"), "{text}");
        assert!(!plain.contains("copies"), "{plain}");
        let yaml = layout("f", &p, Fields { yaml: true, ..f }, None);
        assert!(yaml.contains("        l_copies:  [8, 9]\n"), "{yaml}");
        let spec = pb::LayoutSpec { copies: 3, ..Default::default() };
        let dir = layout("d", &Plain::of_default(2, &spec, false), f, None);
        assert!(dir.trim_end().ends_with("copies:        3"), "{dir}");
    }

    #[test]
    fn a_layout_of_the_file_system_is_looked_up_in_the_map() {
        let targets = (0..3).map(|id| pb::Target { id, ..Default::default() }).collect();
        let chain = |id, first| pb::Chain {
            id,
            epoch: 1,
            replicas: vec![],
            preferred: vec![first],
            lost: false,
        };
        let map = pb::ClusterMap {
            targets,
            chains: vec![chain(10, 2), chain(11, 0)],
            ..Default::default()
        };
        let map = MapView::new(map).unwrap();
        let component = pb::Component {
            end: u64::MAX,
            stripe_size: 65_536,
            data_id: 77,
            chains: vec![10, 11, 10],
            ..Default::default()
        };
        // Layouts that were set before the first byte was written do not count.
        let l = pb::Layout { generation: 6, components: vec![component], drafts: 2 };
        let p = Plain::of_file(9, &l, &map).unwrap();
        assert_eq!(p.objects.iter().map(|o| o.ost).collect::<Vec<_>>(), [2, 0, 2]);
        assert_eq!((p.pattern(), p.stripe_offset, p.generation), ("raid0,overstriped", 2, 4));
        assert!(p.objects.iter().all(|o| o.id == 77 && o.group == 0));
        assert_eq!(p.fid.to_string(), "[0x200000400:0x9:0x0]");
        assert!(Plain::of_file(9, &pb::Layout::default(), &map).is_err());
    }
}
