//! A cluster in containers and a minute of chaos on it: `cluster-tests/chaos`. Where no engine can be had nothing is checked; `./test` says so.

#[path = "common/suite.rs"]
mod suite;

#[test]
fn a_minute_of_chaos_in_containers() {
    suite::run("chaos/run", &[]);
}
