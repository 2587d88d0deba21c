"""python3 cluster-tests/chaos/slow_test.py"""
import sys, unittest

sys.dont_write_bytecode = True
from slow import AFTER, Fault, judge

SERVERS = [(f"{role}{n}", role, "a" if n % 2 else "b") for role, most in (("mds", 3), ("oss", 4)) for n in range(1, most + 1)]


def fault(kind, *nodes, began=10, ended=20):
    f = Fault(kind, "", nodes, began)
    f.ended = ended
    return f


def why(*faults, client="client1", began=12, ended=18):
    held, excuse = judge(client, began, ended, faults, SERVERS)
    return [f.kind for f in held], excuse


class Judged(unittest.TestCase):
    def test_one_server_is_no_excuse(self):
        for kind, node in (("sigkill", "mds1"), ("pause", "oss2"), ("full_oss_volume", "oss1"), ("wiped_oss", "oss4")):
            self.assertEqual(why(fault(kind, node)), ([kind], None))
        self.assertEqual(why(), ([], None), "nor is no fault at all")

    def test_a_link_of_a_client_is_gone_round(self):
        self.assertEqual(why(fault("cut_pair", "client1", "oss2")), (["cut_pair"], None))
        self.assertEqual(why(fault("cut_pair", "mds1", "oss2"))[1], None)
        self.assertEqual(why(fault("cut_pair", "oss1", "oss2"))[1], None, "one of them is enough")

    def test_the_other_rack_is_no_excuse_but_for_who_is_in_it(self):
        racks = fault("cut_racks", "mds2", "oss2", "oss4", "client2")
        self.assertEqual(why(racks)[1], None)
        self.assertEqual(why(racks, client="client2")[1], "its client was hit itself")

    def test_what_nobody_could_answer(self):
        self.assertEqual(why(fault("sigstop", "mds1"), fault("pause", "mds3"))[1], "no majority of the metadata servers")
        self.assertEqual(why(fault("sigstop", "oss1"), fault("pause", "oss2"))[1], "storage servers of both racks")
        self.assertIsNone(why(fault("sigstop", "oss1"), fault("pause", "oss3"))[1], "one rack has all copies")
        self.assertEqual(why(fault("sigkill_all", *(s[0] for s in SERVERS)))[1], "no majority of the metadata servers")
        self.assertEqual(why(fault("lossy_link", "mds1"))[1], "a weak link")

    def test_when_it_was(self):
        for began, ended, held in ((1, 9, 0), (1, 10, 1), (15, 16, 1), (20 + AFTER, 40, 1), (21 + AFTER, 40, 0)):
            self.assertEqual(len(why(fault("pause", "mds1"), began=began, ended=ended)[0]), held, (began, ended))
        self.assertEqual(len(why(fault("pause", "mds1", ended=None), began=900, ended=910)[0]), 1, "not healed")


if __name__ == "__main__":
    unittest.main()
