//! A cluster in containers and a minute of chaos on it: `cluster-tests/chaos`. Without a container
//! engine nothing is checked, and `./test` says so.

fn a_minute_of_chaos_in_containers() {
    crate::suite::run("chaos/run", &[]);
}

mod long {
    #[test]
    #[ignore = "long tier, 150 s: ./test --long"]
    fn a_minute_of_chaos_in_containers() {
        super::a_minute_of_chaos_in_containers();
    }
}
