//! Which chains a new file's stripes get: a pure function of the request, the cluster map and the
//! inode id.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, OnceLock},
};

use strake_proto::{
    ChainId, Code, Error, Ino, Result, TargetId,
    layout::{DEFAULT_STRIPE_SIZE, EOF, MAX_STRIPES, STRIPE_UNIT, set_members, splitmix64},
    map::{ChainExt, MapView},
    pb,
};

/// With up to this many stripes a layout lists its chains; with more it refers to a chain set if it
/// can.
const EXPLICIT_CHAINS: usize = 16;
pub(super) const MAX_COPIES: u32 = 3;
/// Lustre's limit.
const MAX_POOL_NAME: usize = 15;
/// Free space differing by less than this many percent is equal (Lustre's `qos_threshold_rr`).
const EQUAL_PERCENT: u64 = 17;
/// A chain's weight if all are equal, and the highest weight.
const ONE: u64 = 1 << 24;
const MOST: u64 = 1 << 40;
/// How many rounds of proportional fitting over all targets.
const ROUNDS: usize = 12;
/// The newest `ClusterMap.placement`, which new file systems get.
pub const PLACEMENT: u32 = 1;
/// No chain set and no first target: see `OpResult.effective`.
const NONE: u32 = u32::MAX;

/// How fit a chain is for new data, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// All its replicas are in sync, and none is to move.
    Whole,
    /// Some replicas are missing or move, but its first target is alive and none of its targets
    /// drains.
    Stays,
    /// It has an in-sync replica.
    Serves,
}

/// How free space decides where new files go: `ClusterMap.placement`, set when the file system is
/// made and never changed, as every member must choose alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// A chain's free space is that of its fullest replica. For file systems made before format 5.
    ByFullest,
    /// Each target's share of the new data is its share of the free space.
    ByShare,
}

impl Rule {
    fn of(view: &MapView) -> Rule {
        if view.map.placement == 0 { Rule::ByFullest } else { Rule::ByShare }
    }
}

/// A target that a stripe could go to, and the chains it heads; only its fittest chains.
#[derive(Clone, Debug)]
struct Candidate {
    target: TargetId,
    fit: Fit,
    chains: Vec<WeightedChain>,
}

#[derive(Clone, Copy, Debug)]
struct WeightedChain {
    chain: ChainId,
    /// Its share of new files, relative to the others. With [`ByFullest`](Rule::ByFullest): free
    /// space of its fullest replica, MiB.
    weight: u64,
}

impl Candidate {
    /// Its chain for the stripe of a file that uses this target for the `turn`th time, from 0.
    /// Files start with different chains, and the stripes of one file on the same target cycle
    /// through them. So a file as wide as a chain set uses the set in order.
    fn for_turn(&self, ino: Ino, turn: usize) -> &WeightedChain {
        // Must differ from the number with which `by_weight` draws the target.
        let first = splitmix64(&mut { !ino }) % self.chains.len() as u64;
        &self.chains[(first as usize + turn) % self.chains.len()]
    }

    /// One of its chains, drawn by weight for this file; its weight is that of all of them
    /// together.
    fn drawn(&self, ino: Ino) -> WeightedChain {
        let weight: u64 = self.chains.iter().map(|w| w.weight).sum();
        let mut at = splitmix64(&mut { !ino ^ u64::from(self.target) << 48 }) % (weight + 1);
        let drawn = self.chains.iter().find(|w| {
            let here = at < w.weight;
            at = at.wrapping_sub(w.weight);
            here
        });
        WeightedChain { chain: drawn.unwrap_or(&self.chains[0]).chain, weight }
    }
}

/// By copies - 1; in the order of the chain sets.
type Candidates = [Vec<Candidate>; MAX_COPIES as usize];

/// A cluster map and what a choice needs from it, computed once per map.
#[derive(Default)]
pub(super) struct Placement {
    pub view: Arc<MapView>,
    all: Candidates,
    /// By name, computed when first needed.
    pools: BTreeMap<String, OnceLock<Candidates>>,
    /// Whether any file waits for targets, computed when first needed.
    pub(super) waiting: OnceLock<bool>,
}

/// Checks a specification by itself; whether its targets and pool exist is checked against the map
/// where it is used.
pub(super) fn validate(s: &pb::LayoutSpec) -> Result<()> {
    let bad = |m: String| Err(Error::new(Code::Inval, m));
    if !s.stripe_size.is_multiple_of(STRIPE_UNIT) {
        return bad(format!("stripe size {} is not a multiple of 64 KiB", s.stripe_size));
    }
    if s.stripe_count < -1 || s.stripe_count > MAX_STRIPES as i32 {
        return bad(format!("stripe count {} is not in -1..{MAX_STRIPES}", s.stripe_count));
    }
    if s.overstripe < -32 || s.overstripe > MAX_STRIPES as i32 {
        return bad(format!("overstripe count {} is not in -32..{MAX_STRIPES}", s.overstripe));
    }
    if s.copies > MAX_COPIES {
        return bad(format!("{} copies; 1 to {MAX_COPIES} are possible", s.copies));
    }
    if s.pool.len() > MAX_POOL_NAME {
        return bad(format!("pool name '{}' is longer than {MAX_POOL_NAME} characters", s.pool));
    }
    if s.targets.len() > MAX_STRIPES {
        return bad(format!("{} targets listed; {MAX_STRIPES} are the limit", s.targets.len()));
    }
    if !s.targets.is_empty() && s.stripe_count > 0 && s.stripe_count as usize != s.targets.len() {
        return bad(format!(
            "stripe count {} but {} targets listed",
            s.stripe_count,
            s.targets.len()
        ));
    }
    if let (Some(start), false) = (s.start, s.targets.is_empty())
        && !s.targets.contains(&start)
    {
        return bad(format!("first target {start} is not in the list of targets"));
    }
    Ok(())
}

/// Fills what `spec` leaves open from `under`. Stripe count, overstriping and target list are one
/// choice, taken from the first specification that makes it. A first target is inherited only if
/// `spec` chooses neither a pool nor targets.
fn over(spec: &pb::LayoutSpec, under: &pb::LayoutSpec) -> pb::LayoutSpec {
    let mut s = spec.clone();
    if s.stripe_size == 0 {
        s.stripe_size = under.stripe_size;
    }
    if s.copies == 0 {
        s.copies = under.copies;
    }
    if s.start.is_none() && s.targets.is_empty() && s.pool.is_empty() {
        s.start = under.start;
    }
    if s.pool.is_empty() && s.targets.is_empty() {
        s.pool.clone_from(&under.pool);
    }
    if s.stripe_count == 0 && s.overstripe == 0 && s.targets.is_empty() {
        s.stripe_count = under.stripe_count;
        s.overstripe = under.overstripe;
        // An own pool or first target overrides an inherited list of targets.
        if spec.pool.is_empty() && spec.start.is_none() {
            s.targets.clone_from(&under.targets);
        }
    }
    s
}

impl Placement {
    pub(super) fn new(view: Arc<MapView>) -> Placement {
        let all = by_copies(|copies| candidates(&view, copies, "", |_| true));
        let pools = view.map.pools.iter().map(|p| (p.name.clone(), OnceLock::new())).collect();
        Placement { view, all, pools, waiting: OnceLock::new() }
    }

    /// The whole specification for a file: `layers` from the most to the least specific, below them
    /// the defaults of the file system.
    pub(super) fn resolve<'a>(
        &self,
        layers: impl IntoIterator<Item = &'a pb::LayoutSpec>,
    ) -> Result<pb::LayoutSpec> {
        let mut s = pb::LayoutSpec::default();
        for layer in layers {
            s = over(&s, layer);
        }
        let copies = self.view.map.default_copies.max(1);
        let system = pb::LayoutSpec {
            stripe_size: DEFAULT_STRIPE_SIZE,
            stripe_count: i32::from(s.targets.is_empty()),
            copies,
            ..Default::default()
        };
        s = over(&s, &system);
        if s.pool == "none" || s.pool == "ignore" {
            s.pool.clear();
        }
        validate(&s)?;
        self.pool(&s.pool)?;
        Ok(s)
    }

    /// `EINVAL` if a directory's default names a pool or a target that does not exist.
    pub(super) fn validate_default(&self, s: &pb::LayoutSpec) -> Result<()> {
        validate(s)?;
        if s.pool != "none" && s.pool != "ignore" {
            self.pool(&s.pool)?;
        }
        for t in s.targets.iter().copied().chain(s.start) {
            self.known(t)?;
        }
        Ok(())
    }

    fn known(&self, target: TargetId) -> Result<()> {
        match self.view.target(target) {
            Some(_) => Ok(()),
            None => {
                Err(Error::new(Code::Inval, format!("there is no target {target}; see `lfs osts`")))
            }
        }
    }

    /// Members of a pool, `None` for the pool "" of all.
    pub(super) fn pool(&self, name: &str) -> Result<Option<&pb::Pool>> {
        if name.is_empty() {
            return Ok(None);
        }
        match self.view.map.pools.iter().find(|p| p.name == name) {
            Some(p) => Ok(Some(p)),
            None => Err(Error::new(
                Code::Inval,
                format!("there is no pool '{name}'; see `lfs pool_list`"),
            )),
        }
    }

    /// The candidates of a pool: its own chains, which have all replicas on its members; if none of
    /// them serves, chains that a member heads.
    fn of_pool(&self, pool: &pb::Pool, copies: u32) -> Vec<Candidate> {
        let members: BTreeSet<TargetId> = pool.targets.iter().copied().collect();
        let headed = |c: &pb::Chain| members.contains(&c.ost_index());
        let own = candidates(&self.view, copies, &pool.name, headed);
        if own.is_empty() { candidates(&self.view, copies, "", headed) } else { own }
    }

    /// Whether any chain that a file of this resolved specification may have is served.
    pub(super) fn is_served(&self, s: &pb::LayoutSpec) -> bool {
        let of = |pool: &str| {
            let s =
                pb::LayoutSpec { pool: pool.to_owned(), copies: s.copies, ..Default::default() };
            self.candidates(&s).is_ok_and(|all| !all.is_empty())
        };
        // Listed targets may be outside of the pool.
        of(&s.pool) || !s.targets.is_empty() && of("")
    }

    fn candidates(&self, s: &pb::LayoutSpec) -> Result<&[Candidate]> {
        let by_copies = match (self.pool(&s.pool)?, self.pools.get(&s.pool)) {
            (Some(pool), Some(known)) => {
                known.get_or_init(|| by_copies(|copies| self.of_pool(pool, copies)))
            }
            _ => &self.all,
        };
        Ok(by_copies.get(s.copies.wrapping_sub(1) as usize).map_or(&[], |c| c))
    }

    /// The candidates that a file of this resolved specification may use. Targets whose chains have
    /// a dead first target, or drain, are used only if all do.
    fn usable(&self, s: &pb::LayoutSpec) -> Result<Vec<&Candidate>> {
        let all = self.candidates(s)?;
        let any_stays = all.iter().any(|c| c.fit < Fit::Serves);
        Ok(all.iter().filter(|c| c.fit < Fit::Serves || !any_stays).collect())
    }

    /// A layout for a new file. `spec` is resolved; the choice depends only on it, the map and
    /// `ino`.
    pub(super) fn layout(
        &self,
        spec: &pb::LayoutSpec,
        ino: Ino,
        data_id: u64,
        generation: u32,
    ) -> Result<pb::Layout> {
        let chains = self.chains(spec, ino)?;
        let set = self.as_set(&chains, spec.copies);
        let chains = if set.is_some() { Vec::new() } else { chains };
        Ok(layout(spec, data_id, generation, chains, set))
    }

    /// What [`Placement::layout`] would give now, without choosing; see `OpResult.effective`.
    pub(super) fn effective(&self, spec: &pb::LayoutSpec) -> Result<pb::Layout> {
        let count = match spec.targets.len() {
            0 => stripes(spec, self.usable(spec)?.len()),
            n => n,
        };
        let first = spec.start.or(spec.targets.first().copied()).unwrap_or(NONE);
        let set = pb::ChainSetRef { set: NONE, seed: 0, start: first, count: count as u32 };
        Ok(layout(spec, 0, 0, Vec::new(), Some(set)))
    }

    fn chains(&self, s: &pb::LayoutSpec, ino: Ino) -> Result<Vec<ChainId>> {
        if !s.targets.is_empty() {
            let mut turns = BTreeMap::new();
            return s.targets.iter().map(|t| self.explicit(s, *t, ino, &mut turns)).collect();
        }
        let usable = self.usable(s)?;
        let n = usable.len();
        let count = stripes(s, n);
        if n == 0 || count == 0 {
            let pool =
                if s.pool.is_empty() { String::new() } else { format!(" in pool '{}'", s.pool) };
            let m = format!(
                "no targets{pool} can take a file with {} copies; see `strake status`",
                s.copies
            );
            return Err(Error::new(Code::NoSpc, m));
        }
        let first = match s.start {
            Some(t) => {
                self.known(t)?;
                let at = usable.iter().position(|c| c.target == t);
                at.ok_or_else(|| {
                    Error::new(Code::NoDev, format!("target {t} is not available for new files"))
                })?
            }
            None => {
                if count < n
                    && let Some(chains) = self.by_space(&usable, ino)
                {
                    return Ok(by_weight(chains, count, ino));
                }
                (ino % n as u64) as usize
            }
        };
        Ok((first..first + count).map(|i| usable[i % n].for_turn(ino, i / n).chain).collect())
    }

    /// A chain of each target to draw from by weight; `None` if all have about as much space.
    fn by_space(&self, usable: &[&Candidate], ino: Ino) -> Option<Vec<WeightedChain>> {
        let weights =
            |chains: &[WeightedChain]| chains.iter().map(|w| w.weight).collect::<Vec<_>>();
        match Rule::of(&self.view) {
            Rule::ByFullest => {
                let chains: Vec<WeightedChain> =
                    usable.iter().map(|c| *c.for_turn(ino, 0)).collect();
                (!is_even(&weights(&chains))).then_some(chains)
            }
            Rule::ByShare => {
                let weighed = usable.iter().flat_map(|c| &c.chains).any(|w| w.weight != ONE);
                weighed.then(|| usable.iter().map(|c| c.drawn(ino)).collect())
            }
        }
    }

    /// A chain of a listed target. `turns`: how often the file uses each target already.
    fn explicit(
        &self,
        s: &pb::LayoutSpec,
        target: TargetId,
        ino: Ino,
        turns: &mut BTreeMap<TargetId, usize>,
    ) -> Result<ChainId> {
        self.known(target)?;
        let all = self.all.get(s.copies.wrapping_sub(1) as usize).into_iter().flatten();
        let Some(c) = self.candidates(s)?.iter().chain(all).find(|c| c.target == target) else {
            let m =
                format!("target {target} is not available for new files with {} copies", s.copies);
            return Err(Error::new(Code::NoDev, m));
        };
        let turn = turns.entry(target).or_default();
        *turn += 1;
        Ok(c.for_turn(ino, *turn - 1).chain)
    }

    /// The chains as consecutive members of one chain set, if they are many and form that.
    fn as_set(&self, chains: &[ChainId], copies: u32) -> Option<pb::ChainSetRef> {
        if chains.len() <= EXPLICIT_CHAINS {
            return None;
        }
        let sets = self.view.map.sets.iter().filter(|s| s.copies == copies);
        sets.filter_map(|s| Some((s, s.chains.iter().position(|c| *c == chains[0])?)))
            .find(|(s, at)| set_members(&s.chains, 0, *at as u32, chains.len() as u32) == chains)
            .map(|(s, at)| pb::ChainSetRef {
                set: s.id,
                seed: 0,
                start: at as u32,
                count: chains.len() as u32,
            })
    }
}

fn layout(
    s: &pb::LayoutSpec,
    data_id: u64,
    generation: u32,
    chains: Vec<ChainId>,
    set: Option<pb::ChainSetRef>,
) -> pb::Layout {
    let c = pb::Component {
        start: 0,
        end: EOF,
        stripe_size: s.stripe_size,
        pattern: 0,
        copies: s.copies,
        pool: s.pool.clone(),
        data_id,
        chains,
        set,
    };
    pb::Layout { generation, components: vec![c], drafts: 0 }
}

/// The number of stripes of a file when `n` targets are usable.
fn stripes(s: &pb::LayoutSpec, n: usize) -> usize {
    let wanted = match (s.overstripe, s.stripe_count) {
        (o, _) if o > 0 && n > 0 => o as usize,
        (o, _) if o < 0 => o.unsigned_abs() as usize * n,
        (_, c) if c < 0 => n,
        (_, c) => (c as usize).min(n),
    };
    wanted.min(MAX_STRIPES)
}

fn by_copies(of: impl Fn(u32) -> Vec<Candidate>) -> Candidates {
    std::array::from_fn(|i| of(i as u32 + 1))
}

/// The targets that head chains of a pool's sets, with those chains; only chains that are served.
fn candidates(
    view: &MapView,
    copies: u32,
    pool: &str,
    may: impl Fn(&pb::Chain) -> bool,
) -> Vec<Candidate> {
    let (rule, mut at) = (Rule::of(view), BTreeMap::new());
    let mut out: Vec<Candidate> = Vec::new();
    let sets = view.map.sets.iter().filter(|s| s.pool == pool && s.copies == copies);
    for chain in sets.flat_map(|s| &s.chains).filter_map(|id| view.chain(*id)).filter(|c| may(c)) {
        let Some(fit) = fit(view, chain) else { continue };
        let target = chain.ost_index();
        let i = *at.entry(target).or_insert_with(|| {
            out.push(Candidate { target, fit, chains: Vec::new() });
            out.len() - 1
        });
        let c = &mut out[i];
        if fit < c.fit {
            *c = Candidate { target, fit, chains: Vec::new() };
        }
        if fit == c.fit {
            let weight = match rule {
                Rule::ByFullest => chain
                    .preferred
                    .iter()
                    .filter_map(|t| view.target(*t))
                    .map(free_mib)
                    .min()
                    .unwrap_or(0),
                Rule::ByShare => ONE,
            };
            c.chains.push(WeightedChain { chain: chain.id, weight });
        }
    }
    if rule == Rule::ByShare {
        weigh(view, &mut out);
    }
    out
}

/// `None`: no replica serves the chain, so no file gets it. The check for chains that hold nothing
/// depends on this (`cluster::anew`).
fn fit(view: &MapView, c: &pb::Chain) -> Option<Fit> {
    c.head()?;
    let alive = view.target(c.ost_index()).is_some_and(|t| t.alive);
    let stays = c.preferred.iter().all(|t| view.target(*t).is_none_or(|t| !t.draining));
    let whole = c.replicas.len() == c.preferred.len()
        && c.preferred.iter().all(|t| c.state_of(*t) == Some(pb::ReplicaState::ReplicaServing));
    Some(match (alive && stays, whole) {
        (true, true) => Fit::Whole,
        (true, false) => Fit::Stays,
        (false, _) => Fit::Serves,
    })
}

fn free_mib(t: &pb::Target) -> u64 {
    t.capacity.saturating_sub(t.used) >> 20
}

/// Weighs chains so that each target's share of the new data is its share of the free space, as far
/// as its chains allow: proportional fitting, each target in turn, several rounds. Changes nothing
/// while all have about as much. Uses only integers: every metadata server must get the same
/// result.
fn weigh(view: &MapView, all: &mut [Candidate]) {
    let mut of: BTreeMap<TargetId, Vec<(usize, usize)>> = BTreeMap::new();
    let mut copies = 0u128;
    for (i, c) in all.iter().enumerate() {
        for (j, w) in c.chains.iter().enumerate() {
            let replicas = view.chain(w.chain).map(|c| &c.preferred[..]).unwrap_or_default();
            replicas.iter().for_each(|t| of.entry(*t).or_default().push((i, j)));
            copies = copies.max(replicas.len() as u128);
        }
    }
    let free: Vec<u64> = of.keys().map(|t| view.target(*t).map_or(0, free_mib)).collect();
    let space: u128 = free.iter().map(|f| u128::from(*f)).sum();
    if space == 0 || is_even(&free) {
        return;
    }
    let mut sum: u128 = all.iter().flat_map(|c| &c.chains).map(|w| u128::from(w.weight)).sum();
    for _ in 0..ROUNDS {
        for (chains, free) in of.values().zip(&free) {
            let here: u128 =
                chains.iter().map(|(i, j)| u128::from(all[*i].chains[*j].weight)).sum();
            if here == 0 || here == sum {
                continue;
            }
            // Each replica of a chain gets all data of the chain. `want`: this target's share of
            // `space`, at most nearly all.
            let want = (copies * u128::from(*free)).min(space - space.div_ceil(16));
            // Then chains with this target and chains without it are to each other as `want` to the
            // rest.
            let (up, down) = (want * (sum - here), (space - want) * here);
            for (i, j) in chains {
                let w = &mut all[*i].chains[*j].weight;
                let before = *w;
                *w = scaled(before, up, down);
                sum = sum + u128::from(*w) - u128::from(before);
            }
        }
    }
}

/// `weight * up / down`, at most [`MOST`]. Factors so large that the product overflows lose their
/// lowest bits first: only for capacities that no device has.
fn scaled(weight: u64, mut up: u128, mut down: u128) -> u64 {
    let weight = u128::from(weight);
    while weight.checked_mul(up).is_none() {
        (up, down) = (up >> 1, down >> 1);
    }
    (weight * up / down.max(1)).min(u128::from(MOST)) as u64
}

fn is_even(of: &[u64]) -> bool {
    let (most, least) =
        (of.iter().max().copied().unwrap_or(0), of.iter().min().copied().unwrap_or(0));
    u128::from(least) * 100 >= u128::from(most) * u128::from(100 - EQUAL_PERCENT)
}

/// Draws chains by weight, without replacement.
fn by_weight(mut left: Vec<WeightedChain>, count: usize, ino: Ino) -> Vec<ChainId> {
    let mut state = ino;
    let mut chosen = Vec::with_capacity(count);
    // + 1: a full target is chosen only if almost nothing else is left, and the sum is never 0.
    let mut total: u64 = left.iter().map(|c| c.weight + 1).sum();
    while chosen.len() < count && !left.is_empty() {
        let mut at = splitmix64(&mut state) % total;
        let pick = left.iter().position(|c| {
            let here = at < c.weight + 1;
            at = at.wrapping_sub(c.weight + 1);
            here
        });
        let c = left.remove(pick.unwrap_or(0));
        total -= c.weight + 1;
        chosen.push(c.chain);
    }
    chosen
}

/// Free and used space as `statfs` shows it: the space for files with this many copies, each on a
/// separate node. Silent targets count with their last report; `lfs df` shows each target's raw
/// bytes.
pub(super) fn statfs(
    place: &Placement,
    header: &pb::StateHeader,
    pool: &str,
    copies: u32,
) -> Result<pb::StatfsReply> {
    let pool = place.pool(pool)?;
    let (mut total, mut free): (BTreeMap<u32, u64>, BTreeMap<u32, u64>) = Default::default();
    let mut targets = Vec::new();
    let add = |to: &mut BTreeMap<u32, u64>, node, n| {
        let sum = to.entry(node).or_default();
        *sum = sum.saturating_add(n);
    };
    for t in
        place.view.map.targets.iter().filter(|t| pool.is_none_or(|p| p.targets.contains(&t.id)))
    {
        let left = t.capacity.saturating_sub(t.used);
        if !t.given_up {
            // A draining target takes nothing new.
            add(&mut total, t.node, if t.draining { t.used } else { t.capacity });
            add(&mut free, t.node, if t.draining { 0 } else { left });
        }
        targets.push(pb::TargetSpace {
            target: t.id,
            total: t.capacity,
            free: left,
            alive: t.alive,
            node: t.node,
            inodes: 0,
        });
    }
    Ok(pb::StatfsReply {
        total_bytes: usable(total.into_values().collect(), copies),
        free_bytes: usable(free.into_values().collect(), copies),
        inodes: header.inodes,
        // Inode ids are 48 bits per shard and never reused.
        free_inodes: (1u64 << 48).saturating_sub(header.next_ino),
        targets,
    })
}

/// How many bytes fit with this many copies on nodes with this much space each, no two copies on
/// one node. With fewer nodes than copies, when there are no such chains yet, one copy per node is
/// assumed.
pub(super) fn usable(mut nodes: Vec<u64>, copies: u32) -> u64 {
    let copies = (copies.max(1) as usize).min(nodes.len().max(1));
    nodes.sort_unstable_by(|a, b| b.cmp(a));
    let mut rest: u128 = nodes.iter().map(|n| u128::from(*n)).sum();
    // The largest nodes limit the result: what a node has beyond one copy of everything cannot be
    // used.
    for (i, largest) in nodes.iter().enumerate().take(copies) {
        let fits = rest / (copies - i) as u128;
        if u128::from(*largest) <= fits {
            return u64::try_from(fits).unwrap_or(u64::MAX);
        }
        rest -= u128::from(*largest);
    }
    0
}
