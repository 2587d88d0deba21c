use super::*;

const A: SessionId = 1;
const B: SessionId = 2;
const TERM: Duration = Duration::from_millis(2500);

fn limits() -> Limits {
    Limits { term: TERM, ..Limits::default() }
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn table(limits: Limits) -> Leases {
    let mut t = Leases::new(limits, ms(0), 3, []);
    for id in [A, B] {
        assert!(t.hello(id, 1, false) && t.renewed(ms(0), id));
    }
    t
}

fn changed(t: &mut Leases, now: Duration, by: Option<(SessionId, Connection)>, ino: Ino) -> bool {
    !t.applied(now, [(ino, by)]).is_empty()
}

#[test]
fn what_an_entry_did_is_forgotten_as_a_whole() {
    let mut t = table(limits());
    // A removes a name; B knows how many names the file has, and nothing of the directory.
    assert!(t.grant(ms(0), B, 1, 9));
    let before = t.ticket();
    assert_eq!(t.applied(ms(1), [(2, Some((A, 1))), (9, None)]), [9]);
    let removed = t.ticket();
    assert!(
        !t.is_settled(removed, [2]),
        "who is told that the name has gone expects the file to have one less"
    );
    // A client that sees a later change in the directory sees that, too.
    assert!(t.applied(ms(1), [(2, None), (3, None)]).is_empty());
    assert!(
        !t.is_settled(t.ticket(), [3])
            && t.is_settled(t.ticket(), [4])
            && t.is_settled(before, [2, 3, 9])
    );
    t.recalls(ms(2), B, removed);
    assert!(t.is_settled(t.ticket(), [2, 3, 9]) && t.unsettled() == 0);
    t.tick(ms(3));
    assert!(t.entangled.is_empty());
}

#[test]
fn a_change_is_settled_when_all_others_have_forgotten() {
    let mut t = table(limits());
    assert!(t.grant(ms(0), A, 1, 7) && t.grant(ms(0), B, 1, 7) && t.grant(ms(0), B, 1, 8));
    let before = t.ticket();
    assert!(changed(&mut t, ms(1), Some((A, 1)), 7));
    let after = t.ticket();
    assert!(after > before && t.holds(A, 1, 7) && !t.holds(B, 1, 7) && t.holds(B, 1, 8));
    assert!(t.is_settled(before, [7]), "what was read before does not tell of it");
    assert!(!t.is_settled(after, [8, 7]) && t.is_settled(after, [8]) && t.unsettled() == 1);
    assert_eq!(t.recalls(ms(2), B, 0), [(after, 7)]);
    assert_eq!(t.recalls(ms(2), B, 0), [(after, 7)], "sent again until it is acknowledged");
    assert!(
        t.recalls(ms(3), A, u64::MAX).is_empty() && !t.is_settled(after, [7]),
        "another's word counts for nothing"
    );
    assert!(t.recalls(ms(3), B, after).is_empty() && t.is_settled(after, [7]));
    assert!(!changed(&mut t, ms(4), Some((A, 1)), 7), "nobody else holds it");
    assert_eq!((t.owed(), t.held_by(A), t.held_by(B)), (0, 1, 1));
}

#[test]
fn acknowledgements_meant_for_a_former_leader_settle_nothing() {
    let mut old = table(limits());
    old.grant(ms(0), B, 1, 7);
    changed(&mut old, ms(0), None, 7);
    let seen = old.ticket();
    let mut new = Leases::new(limits(), ms(0), 4, []);
    new.hello(B, 2, false);
    new.renewed(ms(0), B);
    new.grant(ms(0), B, 2, 7);
    changed(&mut new, ms(0), None, 7);
    assert_eq!(new.recalls(ms(0), B, seen), [(new.ticket(), 7)]);
}

#[test]
fn nobody_waits_longer_than_a_term_for_a_silent_holder() {
    let mut t = table(limits());
    t.grant(ms(0), B, 1, 7);
    t.renewed(ms(1000), B);
    changed(&mut t, ms(1500), None, 7);
    let ticket = t.ticket();
    assert_eq!(t.next_end(), Some(ms(3500)));
    t.tick(ms(3499));
    assert!(!t.is_settled(ticket, [7]));
    t.tick(ms(3500));
    assert!(t.is_settled(ticket, [7]));
    assert!(!t.grant(ms(3500), B, 1, 7), "not before it renews");
    assert!(t.renewed(ms(3600), B) && t.grant(ms(3600), B, 1, 7));
}

#[test]
fn one_who_renews_and_does_not_answer_is_given_up() {
    let mut t = table(limits());
    t.grant(ms(0), B, 1, 7);
    changed(&mut t, ms(0), None, 7);
    for s in 1..5 {
        assert!(t.renewed(ms(s * 1000), B) && t.tick(ms(s * 1000)).is_empty());
    }
    assert_eq!(t.tick(ms(5000)), [B]);
    assert!(!t.renewed(ms(5000), B) && !t.grant(ms(5000), B, 1, 8));
    assert!(!t.is_settled(t.ticket(), [7]), "it may still answer from memory");
    t.ended(ms(5000), B, false);
    assert!(t.tick(ms(6499)).is_empty() && !t.is_settled(t.ticket(), [7]));
    t.tick(ms(4000) + TERM);
    assert!(t.is_settled(t.ticket(), [7]));
}

#[test]
fn a_hello_that_comes_late_is_refused() {
    let mut t = table(limits());
    assert!(t.hello(B, 3, false) && t.renewed(ms(0), B) && t.grant(ms(0), B, 3, 7));
    assert!(!t.hello(B, 2, false) && !t.hello(B, 3, true) && t.holds(B, 3, 7));
    t.dropped(ms(0), B, 1, 1, &[7]);
    assert!(t.holds(B, 3, 7) && !t.holds(B, 1, 7), "given back on a former connection");
    assert!(
        changed(&mut t, ms(0), Some((B, 1)), 7),
        "learned on a later connection than the change was sent on"
    );
}

#[test]
fn a_request_gives_leases_back_once() {
    let mut t = table(limits());
    let gives = |t: &mut Leases, seq, ino| t.dropped(ms(0), B, 1, seq, &[ino]);
    let holds = |t: &mut Leases, ino| t.grant(ms(0), B, 1, ino) && t.holds(B, 1, ino);
    assert!(holds(&mut t, 7) && holds(&mut t, 8));
    gives(&mut t, 5, 7);
    assert!(!t.holds(B, 1, 7) && t.holds(B, 1, 8));
    // It was answered and has cached it again, when the network delivers a copy of that request.
    assert!(holds(&mut t, 7));
    gives(&mut t, 5, 7);
    assert!(changed(&mut t, ms(0), None, 7), "it is recalled");
    // Overtaken by a later request that gave something back: it is asked, too.
    gives(&mut t, 4, 8);
    assert!(changed(&mut t, ms(0), None, 8));
    // A request that gives nothing back overtakes nothing, and the numbers count beyond the end of
    // a term.
    t.dropped(ms(0), B, 1, 9, &[]);
    t.tick(TERM);
    assert!(t.renewed(TERM, B) && t.grant(TERM, B, 1, 7));
    t.dropped(TERM, B, 1, 5, &[7]);
    assert!(t.holds(B, 1, 7));
    t.dropped(TERM, B, 1, 6, &[7]);
    assert!(!t.holds(B, 1, 7));
    // On a new connection it has forgotten everything anyhow.
    assert!(t.hello(B, 2, false) && t.renewed(TERM, B) && t.grant(TERM, B, 2, 7));
    t.dropped(TERM, B, 2, 6, &[7]);
    assert!(!t.holds(B, 2, 7));
}

#[test]
fn a_daemon_in_place_of_another_answers_for_what_the_kernel_knows() {
    let mut t = table(limits());
    t.grant(ms(0), B, 1, 7);
    assert!(t.hello(B, 2, true) && t.holds(B, 2, 7));
    changed(&mut t, ms(0), None, 7);
    assert_eq!(t.recalls(ms(0), B, 0).len(), 1);
    // Leases from a former leader are not in the table: nothing is answered while they may live.
    let mut new = Leases::new(limits(), ms(0), 4, [A, B]);
    assert!(new.hello(A, 1, false) && new.in_grace(ms(0)));
    assert!(new.hello(B, 3, true) && new.in_grace(ms(2499)) && !new.in_grace(TERM));
}

#[test]
fn grace_ends_when_all_have_said_hello() {
    let mut t = Leases::new(limits(), ms(0), 1, [A, B]);
    assert!(t.in_grace(ms(0)) && !t.renewed(ms(0), A));
    t.hello(A, 1, false);
    assert!(t.in_grace(ms(0)));
    t.ended(ms(0), B, false);
    assert!(t.in_grace(ms(0)), "its leases are not over because its session is");
    t.hello(B, 1, false);
    assert!(!t.in_grace(ms(0)));
}

#[test]
fn bounds() {
    let limits = Limits { of_session: 2, of_all: 3, of_inode: 1, hot: 2, ..limits() };
    let mut t = table(limits);
    assert!(t.grant(ms(0), A, 1, 1) && t.grant(ms(0), A, 1, 2));
    assert!(t.grant(ms(0), A, 1, 2), "it has that");
    assert!(!t.grant(ms(0), B, 1, 1), "of an inode");
    assert!(t.grant(ms(0), B, 1, 3) && !t.grant(ms(0), B, 1, 4), "of all");
    t.dropped(ms(0), A, 1, 1, &[1]);
    assert!(t.grant(ms(0), B, 1, 4));
    // Recalled twice within a second: not leased for one.
    assert!(
        changed(&mut t, ms(100), None, 4)
            && t.grant(ms(100), B, 1, 4)
            && changed(&mut t, ms(200), None, 4)
    );
    t.recalls(ms(200), B, t.ticket());
    assert!(!t.grant(ms(1199), B, 1, 4) && t.grant(ms(1200), B, 1, 4));
    assert!(changed(&mut t, ms(1300), None, 4) && t.grant(ms(1300), B, 1, 4), "counted anew");
}

#[test]
fn nothing_is_left_of_those_who_went() {
    let mut t = table(limits());
    for ino in 1..100 {
        t.grant(ms(0), A, 1, ino);
        t.grant(ms(0), B, 1, ino);
        changed(&mut t, ms(0), Some((A, 1)), ino);
    }
    t.ended(ms(0), A, true);
    t.ended(ms(0), B, false);
    assert_eq!((t.held_by(A), t.owed()), (0, 99));
    t.tick(TERM);
    t.tick(TERM);
    assert!(t.sessions.is_empty() && t.held == 0 && t.owed() == 0 && t.unsettled() == 0);
    assert!(t.inodes.is_empty() && t.cooling.is_empty());
}

/// Recalls of a session that holds too much.
#[test]
fn a_full_session_forgets_what_it_has_had_for_longest() {
    let mut t = table(Limits { of_session: 16, ..limits() });
    for n in 1..=16 {
        assert!(t.grant(ms(n), A, 1, 100 - n));
    }
    let before = t.ticket();
    assert!(t.grant(ms(20), A, 1, 200) && t.holds(A, 1, 200) && t.held_by(A) == 15);
    assert!(!t.holds(A, 1, 99) && !t.holds(A, 1, 98) && t.holds(A, 1, 97));
    assert!(
        t.is_settled(t.ticket(), [98, 99]) && t.is_all_settled(t.ticket()),
        "nobody waits for it"
    );
    assert!(
        !t.grant(ms(20), A, 1, 99) && t.grant(ms(20), A, 1, 201),
        "not while it is to be forgotten"
    );
    // A change meanwhile finds the copy that is still there.
    assert!(changed(&mut t, ms(21), None, 98) && t.owing(98).eq([A]));
    let number = t.ticket();
    assert!(!t.is_settled(number, [98]) && !t.is_all_settled(number) && t.is_settled(number, [99]));
    let sent = t.recalls(ms(22), A, before);
    assert_eq!(sent.iter().map(|r| r.1).collect::<BTreeSet<_>>(), [98, 99].into());
    assert_eq!(sent.len(), 3);
    let rest = t.recalls(ms(22), A, number - 1);
    assert!(
        rest == [(number, 98)] && !t.is_settled(number, [98]),
        "the number before is not the change's"
    );
    assert!(t.recalls(ms(22), A, number).is_empty() && t.is_settled(number, [98]));
    assert!(
        t.grant(ms(23), A, 1, 99) && t.grant(ms(23), A, 1, 98) && changed(&mut t, ms(24), None, 99)
    );
    t.ended(ms(24), A, true);
    assert!(!changed(&mut t, ms(24), None, 98) && t.held == 0 && t.owed() == 0);
    t.tick(ms(2000));
    assert!(t.inodes.is_empty());
}

#[test]
fn one_that_does_not_forget_gets_nothing_more() {
    let mut t = table(Limits { of_session: 4, ..limits() });
    let got = (1..100).filter(|ino| t.grant(ms(0), A, 1, *ino)).count();
    assert_eq!((got, t.owed_by(A), t.held_by(A)), (8, 4, 4));
    t.recalls(ms(0), A, t.ticket());
    assert!(t.grant(ms(0), A, 1, 100));
}

#[test]
fn only_the_connection_of_the_last_hello_counts() {
    let mut t = table(limits());
    assert!(t.meets(A, 1) && !t.meets(A, 2) && !t.meets(7, 1) && !t.meets(A, 0));
    assert_eq!((t.ends(ms(0), A), t.ends(TERM, A)), (Some(TERM), None));
    t.hello(A, 2, false);
    assert!(!t.meets(A, 1) && t.meets(A, 2));
    assert_eq!(t.ends(ms(0), A), Some(TERM), "it has no more than it may have had before");
}

#[test]
fn what_was_sent_before_the_last_hello_is_late() {
    let mut t = Leases::new(limits(), ms(0), 1, [A, B]);
    assert!(t.is_late(A, 1) && !t.is_late(7, 1), "it was open before this leader was elected");
    t.hello(A, 2, false);
    assert!(t.is_late(A, 1) && !t.is_late(A, 2) && !t.is_late(A, 3));
    assert!(t.is_late(B, 1));
    t.hello(B, 1, true);
    assert!(!t.is_late(B, 1));
}

#[test]
fn a_leader_that_stood_still_gives_nobody_up() {
    for renews in [false, true] {
        let mut t = table(limits());
        t.grant(ms(0), B, 1, 7);
        changed(&mut t, ms(0), None, 7);
        assert!(!renews || t.renewed(ms(60_000), B));
        assert!(t.tick(ms(60_000)).is_empty() && t.owed() == 0);
    }
}
