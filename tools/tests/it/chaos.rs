//! A cluster in containers and a minute of chaos on it: `cluster-tests/chaos`. Without a container
//! engine nothing is checked, and `./test` says so.

#[test]
fn a_minute_of_chaos_in_containers() {
    crate::suite::run("chaos/run", &[]);
}
