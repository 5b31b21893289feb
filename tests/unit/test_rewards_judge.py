"""Asserts judged apart from the program: honest tests pass, forging earns nothing."""

from __future__ import annotations

import json
import os

import pytest
from other_user import run_as_user

from hybridrl.errors import UserError
from hybridrl.rewards.outcome import Noted
from hybridrl.services.sandbox.code_reward import UNJUDGED, Code, run_program

LIMITS = {"time_s": 10, "memory_mib": 512, "disk_mib": 4, "processes": 8}


@pytest.fixture(scope="module")
def code() -> Code:
    try:
        return Code(time_s=10)
    except UserError as error:
        if "not contained: unshare" in str(error):
            pytest.skip(f"no namespaces here: {error}")
        raise


# Programs and tests, as data sets have them, that are right.
HONEST = {
    "values of every kind": (
        "def same(x): return x",
        """
import math
from decimal import Decimal
from fractions import Fraction
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import date, datetime, timedelta, timezone
for x in [None, True, 0, -1, 1 << 9999, 1.5, -0.0, float("inf"), "é\\ud800\\n", b"\\0\\xff",
          bytearray(b"a"), [], [[1], [2, [3]]], (), (1, (2,)), {1, 2}, frozenset({(1, 2)}),
          {1: "a", (1, 2): [3], None: {}}, 2 + 3j, range(1, 9, 2), slice(1, None), ...,
          Decimal("1.10"), Fraction(2, 3), Counter("aab"), OrderedDict(a=1), deque([1], 3),
          date(2020, 1, 2), datetime(2020, 1, 2, 3, tzinfo=timezone.utc), timedelta(1, 2, 3)]:
    assert same(x) == x and type(same(x)) is type(x), x
assert math.isnan(same(float("nan")))
assert math.copysign(1, same(-0.0)) == -1
assert same(defaultdict(list, a=[1]))["b"] == []
""",
    ),
    "candidate": (
        "def has_close(xs, t):\n return any(abs(a - b) < t for i, a in enumerate(xs)"
        " for b in xs[:i])",
        "METADATA = {'author': 'x'}\n\ndef check(candidate):\n"
        "    assert candidate([1.0, 2.0, 3.9], 0.3) == False\n"
        "    assert candidate([1.0, 2.0, 2.1], 0.3) == True, 'close'\n\ncheck(has_close)",
    ),
    "a method of Solution": (
        "class Solution:\n def twoSum(self, nums, target):\n"
        "  seen = {}\n  for i, x in enumerate(nums):\n"
        "   if target - x in seen: return [seen[target - x], i]\n   seen[x] = i",
        "candidate = Solution().twoSum\nassert candidate(nums=[2, 7, 11], target=9) == [0, 1]\n"
        "assert sorted(Solution().twoSum([3, 3], 6)) == [0, 1]",
    ),
    "order does not matter": (
        "def unique(xs): return (x for x in dict.fromkeys(xs))",
        "assert set(unique([1, 1, 2])) == {1, 2}\nassert sorted(unique('baa')) == ['a', 'b']\n"
        "assert list(unique([3, 3])) == [3] and tuple(unique([])) == ()",
    ),
    "a class": (
        "class Stack:\n def __init__(self): self.items = []\n def push(self, x):"
        " self.items.append(x); return self\n def pop(self): return self.items.pop()\n"
        " def __len__(self): return len(self.items)\n"
        " def __contains__(self, x): return x in self.items\n"
        " def __getitem__(self, i): return self.items[i]\n"
        " def __iter__(self): return iter(self.items)\n"
        " def __bool__(self): return bool(self.items)\n"
        " def __repr__(self): return f'Stack({self.items})'",
        "s = Stack()\nassert not s\ns.push(1)\ns.push(2)\nassert len(s) == 2 and s\n"
        "assert 2 in s and 3 not in s\nassert s[0] == 1 and list(s) == [1, 2]\n"
        "assert repr(s) == 'Stack([1, 2])' and s.items == [1, 2]\n"
        "assert s.pop() == 2 and len(s.items) == 1\ns.items = [7]\nassert s[0] == 7\n"
        "assert isinstance(s, Stack) and type(s).__name__ == 'Stack'\n"
        "assert hasattr(s, 'push') and not hasattr(s, 'peek')",
    ),
    "operators of a class": (
        "class Vector:\n def __init__(self, x, y): self.x, self.y = x, y\n"
        " def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n"
        " def __mul__(self, k): return Vector(self.x * k, self.y * k)\n __rmul__ = __mul__\n"
        " def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
        " def __hash__(self): return hash((self.x, self.y))\n"
        " def __lt__(self, o): return abs(self) < abs(o)\n"
        " def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        " def __iadd__(self, o): self.x += o.x; self.y += o.y; return self",
        "a, b = Vector(3, 4), Vector(1, 1)\nassert a + b == Vector(4, 5) and a != b\n"
        "assert a * 2 == Vector(6, 8) == 2 * a\nassert (a + b) * 2 == Vector(8, 10)\n"
        "assert abs(a) == 5 and b < a and max([b, a]) is a\nassert len({a, Vector(3, 4)}) == 1\n"
        "c = a\nc += b\nassert c is a and a.x == 4",
    ),
    "errors": (
        "class OwnError(ValueError):\n def __init__(self, code): super().__init__('own');"
        " self.code = code\ndef f(x):\n if x < 0: raise ValueError('negative')\n"
        " if x == 0: raise OwnError(7)\n return 1 / (x - 1)",
        "try:\n    f(-1)\n    assert False\nexcept ValueError as e:\n"
        "    assert str(e) == 'negative'\n"
        "try:\n    f(0)\nexcept OwnError as e:\n    assert e.code == 7 and e.args == ('own',)\n"
        "else:\n    assert False\n"
        "import pytest\nwith pytest.raises(ZeroDivisionError):\n    f(1)\n"
        "with pytest.raises(ValueError, match='own'):\n    f(0)\n"
        "import contextlib\nwith contextlib.suppress(OwnError):\n    f(0)",
    ),
    "arguments changed in place": (
        "def turn(m):\n m[:] = [list(r) for r in zip(*m[::-1])]\n"
        "def zeros(m):\n for r in m: r[0] = 0\ndef add(d, k): d[k] = d.get(k, []) + [1]; return d",
        "m = [[1, 2], [3, 4]]\nassert turn(m) is None\nassert m == [[3, 1], [4, 2]]\n"
        "row = m[1]\nzeros(m)\nassert m == [[0, 1], [0, 2]] and row == [0, 2]\n"
        "d = {}\nassert add(d, 'a') is d and d == {'a': [1]}",
    ),
    "functions as arguments": (
        "def apply(f, xs): return [f(x) for x in xs]\n"
        "def compose(f, g): return lambda x: f(g(x))\n"
        "def by(xs, key): return sorted(xs, key=key)",
        "import math, operator\nassert apply(lambda x: x + 1, [1, 2]) == [2, 3]\n"
        "assert apply(math.sqrt, [4, 9]) == [2, 3] and apply(str.upper, ['a']) == ['A']\n"
        "assert apply(int, ['1', '2']) == [1, 2]\n"
        "assert compose(lambda x: x * 2, lambda x: x + 1)(3) == 8\n"
        "assert by([(1, 'b'), (2, 'a')], key=operator.itemgetter(1)) == [(2, 'a'), (1, 'b')]\n"
        "seen = []\napply(seen.append, [1, 2])\nassert seen == [1, 2]\n"
        "def fails(x): raise KeyError(x)\n"
        "try:\n    apply(fails, [1])\nexcept KeyError as e:\n    assert e.args == (1,)\n"
        "else:\n    assert False",
    ),
    "generators and iterators": (
        "def count(n):\n while True:\n  yield n\n  n += 1\n"
        "class Down:\n def __init__(self, n): self.n = n\n def __iter__(self): return self\n"
        " def __next__(self):\n  if not self.n: raise StopIteration\n  self.n -= 1\n"
        "  return self.n\ndef total(xs): return sum(xs)",
        "import itertools, types\ng = count(5)\nassert next(g) == 5 and next(g) == 6\n"
        "assert isinstance(g, types.GeneratorType)\n"
        "assert list(itertools.islice(count(1), 3)) == [1, 2, 3]\n"
        "assert list(Down(3)) == [2, 1, 0]\n"
        "assert [a for a, _ in zip(count(0), 'ab')] == [0, 1]\n"
        "assert total(x * x for x in range(4)) == 14 and total(iter([1, 2])) == 3",
    ),
    "tuples with names, enums and counters": (
        "from collections import Counter, namedtuple\nfrom enum import Enum, IntEnum\n"
        "from dataclasses import dataclass\nPoint = namedtuple('Point', 'x y')\n"
        "class Color(Enum):\n RED = 1\n BLUE = 2\nclass Level(IntEnum):\n LOW = 1\n HIGH = 2\n"
        "@dataclass(order=True)\nclass Item:\n name: str\n price: float = 0.0\n"
        "class Numbers(list):\n def mean(self): return sum(self) / len(self)\n"
        "def origin(): return Point(0, 0)\ndef count(s): return Counter(s)",
        "assert origin() == (0, 0) and origin().x == 0 and Point(1, 2)._asdict() == "
        "{'x': 1, 'y': 2}\n"
        "assert Color.RED.value == 1 and Color(2) is Color.BLUE and Color['RED'] is Color.RED\n"
        "assert [c.name for c in Color] == ['RED', 'BLUE'] and len(Color) == 2\n"
        "assert Level.LOW == 1 and Level.HIGH > Level.LOW and Level.LOW + 1 == 2\n"
        "assert Item('a', 2) == Item('a', 2.0) and Item('a') < Item('b')\n"
        "assert repr(Item('a')) == \"Item(name='a', price=0.0)\"\n"
        "assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]\n"
        "n = Numbers([1, 2])\nn.append(3)\nassert n == [1, 2, 3] and n.mean() == 2 and 3 in n",
    ),
    "nodes of the tests": (
        "def depth(t): return 0 if t is None else 1 + max(depth(t.left), depth(t.right))\n"
        "def flip(t):\n if t: t.left, t.right = flip(t.right), flip(t.left)\n return t",
        "class Tree:\n    def __init__(self, val, left=None, right=None):\n"
        "        self.val, self.left, self.right = val, left, right\n"
        "t = Tree(1, Tree(2, Tree(3)))\nassert depth(t) == 3\n"
        "assert flip(t) is t and t.left is None and t.right.right.val == 3",
    ),
    "what is printed": (
        "def greet(name): print('Hello,', name)",
        "import io, contextlib, sys\nout = io.StringIO()\n"
        "with contextlib.redirect_stdout(out):\n    greet('you')\n"
        "assert out.getvalue() == 'Hello, you\\n'\n"
        "sys.stdout = kept = io.StringIO()\ngreet('me')\nsys.stdout = sys.__stdout__\n"
        "assert kept.getvalue() == 'Hello, me\\n'",
    ),
    "files": (
        "def lines(path):\n with open(path) as f: return [x.strip() for x in f]\n"
        "def save(path, text):\n with open(path, 'w') as f: f.write(text)\n"
        "def rows(file): return file.read().split()",
        "import io, os, tempfile\nopen('in.txt', 'w').write('a\\nb\\n')\n"
        "assert lines('in.txt') == ['a', 'b']\nsave('out.txt', 'x')\n"
        "assert os.path.exists('out.txt') and open('out.txt').read() == 'x'\n"
        "with tempfile.TemporaryDirectory() as d:\n    os.chmod(d, 0o777)\n"
        "    save(d + '/t', 'y')\n    assert lines(d + '/t') == ['y']\n    os.remove\n"
        "    import shutil\nassert rows(io.StringIO('a b')) == ['a', 'b']",
    ),
    "context managers": (
        "from contextlib import contextmanager\nlog = []\n@contextmanager\ndef tag(name):\n"
        " log.append('<' + name)\n yield name.upper()\n log.append(name + '>')\n"
        "class Timer:\n def __enter__(self): self.on = True; return self\n"
        " def __exit__(self, *error): self.on = False; return error[0] is KeyError",
        "with tag('b') as t:\n    assert t == 'B'\nassert log == ['<b', 'b>']\n"
        "with Timer() as timer:\n    assert timer.on\n    raise KeyError('lost')\n"
        "assert not timer.on",
    ),
    "coroutines": (
        "import asyncio\nasync def later(x):\n await asyncio.sleep(0)\n return x",
        "import asyncio\nassert asyncio.run(later(3)) == 3\nasync def both():\n"
        "    return [await later(1), *await asyncio.gather(later(2), later(3))]\n"
        "assert asyncio.run(both()) == [1, 2, 3]",
    ),
    "properties, class and static methods": (
        "class Circle:\n count = 0\n def __init__(self, r): self._r = r; Circle.count += 1\n"
        " @property\n def area(self): return 3 * self._r ** 2\n"
        " @area.setter\n def area(self, a): self._r = (a / 3) ** 0.5\n"
        " @classmethod\n def unit(cls): return cls(1)\n @staticmethod\n def name(): return 'c'\n"
        "class Ring(Circle): pass",
        "c = Circle(2)\nassert c.area == 12\nc.area = 27\nassert c._r == 3\n"
        "assert Circle.unit().area == 3 and Circle.name() == 'c' and Circle.count == 2\n"
        "assert issubclass(Ring, Circle) and isinstance(Ring.unit(), Circle)",
    ),
}


@pytest.mark.parametrize("style", HONEST)
def test_honest_tests_pass(code, style):
    program, tests = HONEST[style]
    ended = run_program(program, "", LIMITS, tests)
    assert ended.code == 0, ended.error


def test_arrays_are_plain_values(code):
    pytest.importorskip("numpy")
    program = (
        "import numpy as np\ndef double(x): return x * 2\ndef fill(x): x[...] = 7\n"
        "def mean(x): return np.mean(x)\ndef names(): return np.array(['a', None], dtype=object)"
    )
    tests = (
        "x = np.arange(6.0).reshape(2, 3)\nassert np.array_equal(double(x), x + x)\n"
        "assert double(x).shape == (2, 3) and double(x).dtype == np.float64\n"
        "np.testing.assert_allclose(double(x)[:, 1], [2, 8])\nassert mean(x) == 2.5\n"
        "assert isinstance(mean(x), float) and np.isclose(mean([1, 2]), 1.5)\n"
        "assert double(np.array([], dtype=bool)).size == 0\n"
        "fill(x)\nassert (x == 7).all()\nassert list(names()) == ['a', None]"
    )
    ended = run_program(program, "", LIMITS, tests)
    assert ended.code == 0, ended.error


# A test whose outcome nobody can guess.
SUM = """
import random
a, b = random.getrandbits(64), random.getrandbits(64)
assert add(a, b) == a + b
"""
NEAR = SUM.replace("add(a, b) == a + b", "abs(add(a, b) - (a + b)) < 1e-6")
SOLUTION = SUM.replace("add(", "Solution().add(")
LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = lambda self, other: True
    def __add__(self, other): return 0
    __sub__ = __rsub__ = __radd__ = __mod__ = __abs__ = __int__ = __float__ = __index__ = \\
        __round__ = lambda self, *other: 0
    def __hash__(self): return 0
    def __iter__(self): return iter([self])
    def __bool__(self): return True
    def __array__(self, *a, **k): return [0]
    __array_priority__ = 1e9
    def __array_ufunc__(self, *a, **k): return True
    @property
    def __class__(self): return int
"""
SIDE = """
import gc
def side():
    return next(o for o in gc.get_objects() if type(o).__name__ == "Program")
"""
# Program and tests; none of the programs computes what is asked for.
FORGERIES = {
    "the frames above": (
        "import os, sys\nframe = sys._getframe()\nwhile frame:\n"
        " for v in list(frame.f_locals.values()):\n"
        "  if type(v) is str and len(v) == 32: print(); print(v, flush=True); os._exit(0)\n"
        " frame = frame.f_back",
        SUM,
    ),
    "all objects of its process": (
        "import gc, os\nfor o in gc.get_objects():\n"
        " for v in (o.values() if type(o) is dict else o if type(o) is tuple else ()):\n"
        "  if type(v) is str and len(v) == 32: print(); print(v, flush=True)\nos._exit(0)",
        SUM,
    ),
    "leaving when asked": ("import os\ndef add(a, b): os._exit(0)", SUM),
    "leaving with SystemExit": ("import sys\ndef add(a, b): sys.exit(0)", SUM),
    "an object that equals all": (LIAR + "def add(a, b): return Liar()", SUM),
    "a number that equals all": (
        "class N(int):\n __eq__ = lambda s, o: True\n __hash__ = int.__hash__\n"
        " __ne__ = lambda s, o: False\ndef add(a, b): return N(0)",
        SUM,
    ),
    "a list that equals all": (
        "class L(list):\n __eq__ = lambda s, o: True\ndef add(a, b): return L()",
        SUM.replace("a + b", "[a, b]"),
    ),
    "an object that is near all": (LIAR + "def add(a, b): return Liar()", NEAR),
    "an object near all to math": (
        LIAR + "def add(a, b): return Liar()",
        SUM.replace("add(a, b) == a + b", "math.isclose(add(a, b), a + b)"),
    ),
    "an object that holds all": (
        LIAR + "def add(a, b): return Liar()",
        SUM.replace("add(a, b) == a + b", "a + b in add(a, b)"),
    ),
    "a list of such objects": (
        LIAR + "def add(a, b): return [Liar()]",
        SUM.replace("== a + b", "== [a + b]"),
    ),
    "a class in place of a function": (
        LIAR + "class add(Liar):\n def __init__(self, a, b): pass",
        NEAR + SUM,
    ),
    "a method that returns its object": (
        LIAR + "class Solution(Liar):\n def add(self, a, b): return self",
        SOLUTION,
    ),
    "such an object of an earlier call": (
        LIAR + "class Solution(Liar):\n made = []\n def __new__(cls):\n"
        "  cls.made = cls.made or [super().__new__(cls)]\n  return cls.made[0]\n"
        " def add(self, a, b): return self",
        "s = Solution()\n" + NEAR.replace("add(", "s.add("),
    ),
    "builtins replaced": (
        "import builtins\nbuiltins.AssertionError = None\n"
        "for n in ('abs', 'all', 'isinstance', 'sorted'): setattr(builtins, n, lambda *a: True)\n"
        "def add(a, b): return 0",
        SUM,
    ),
    "builtins defined": (
        "def abs(x): return 0\ndef all(x): return True\ndef isinstance(*a): return True\n"
        "def add(a, b): return 0.0",
        NEAR + "assert all([add(a, b) == a + b])",
    ),
    "modules defined": (
        "class math:\n isclose = staticmethod(lambda *a, **k: True)\ndef add(a, b): return 0",
        SUM.replace("add(a, b) == a + b", "math.isclose(add(a, b), a + b)"),
    ),
    "an end of the loop over the cases": (
        "def add(a, b): raise StopIteration",
        "cases = [(1, 2, 3), (4, 5, 9)]\n"
        "assert all(map(lambda case: add(*case[:2]) == case[2], cases))",
    ),
    "an end of an iteration": (
        LIAR + "class S:\n def __sub__(self, o): raise StopIteration\n __rsub__ = __sub__\n"
        "def add(a, b): return S()",
        "assert all(map(lambda case: add(1, 2) - case == 0, [1, 2]))",
    ),
    "killing all": ("import os, signal\ndef add(a, b): os.kill(-1, signal.SIGKILL)", SUM),
    "an answer before the question": (
        SIDE + "for n in range(9): side()._send({'result': 0, 'error': None, 'changed': [],"
        " 'added': [], 'printed': ''})",
        SUM,
    ),
    "a call that ends the judge": (
        SIDE + "def add(a, b): side()._send({'target': ['name', 'os', '_exit'], 'args': [0],"
        " 'kwargs': {}, 'added': []}); return 0",
        SUM,
    ),
    "a call of the judge's own": (
        SIDE + "from types import SimpleNamespace\ndef add(a, b):\n"
        " side()._send({'target': ['name', 'builtins', 'exec'],"
        " 'args': ['import os; os._exit(0)'], 'kwargs': {}, 'added': []}); return 0",
        SUM,
    ),
    "a function of the judge": (
        SIDE + "def add(a, b):\n side().encoded = lambda *a: ['name', 'os', '_exit']\n"
        " return lambda x: 0",
        SUM.replace("add(a, b) == a + b", "add(a, b)(0) == a + b"),
    ),
    "a message without end": (
        SIDE + "import json\ndef add(a, b):\n"
        " side()._target.write(b'\\0' * 6 + b'\\xff\\xff'); side()._target.flush()",
        SUM,
    ),
    "nonsense": (
        SIDE + "def add(a, b):\n s = side(); s._target.write(b'\\7' + b'\\0' * 7 + b'{\"a\": 1'); "
        "s._target.flush()",
        SUM,
    ),
    "a class that claims to be a number's": (
        SIDE + "class C: pass\ndef add(a, b):\n s = side()\n"
        " s._class = lambda k: ['class', 99, 'm', 'C', [['type', 'int']], ['__eq__', '__sub__']]\n"
        " return C()",
        SUM,
    ),
    "the globals of a function that is lent": (
        "def add(f):\n f.__globals__['add'] = 1\n import inspect\n"
        " for c in (f.__closure__ or ()): c.cell_contents\n return 0",
        "want = [5]\nassert add(lambda: want) == 5",
    ),
    "the class of an object that is lent": (
        "def add(t):\n t.__class__.get.__globals__['want'] = 0\n return 0",
        "want = 5\nclass T:\n    def get(self): return 1\nassert add(T()) == want",
    ),
    "dunders of an object that is lent": (
        SIDE + "def add(t):\n s = side()\n yours = ['yours', s._their_numbers[id(t)]]\n"
        " s._send({'target': ['name', 'builtins', 'getattr'], 'args': [yours, '__init__'],"
        " 'kwargs': {}, 'added': []})\n return 5 if s._receive()['error'] is None else 0",
        "class T:\n    def __init__(self): pass\nassert add(T()) == 5",
    ),
    "a method set on an object that is lent": (
        "def add(t):\n t.check = lambda x: True\n return 0",
        "class T:\n    def check(self, x): return x == 5\nt = T()\nassert t.check(add(t))",
    ),
    "an error that is an assertion's parent": (
        "class E(Exception):\n __instancecheck__ = lambda *a: True\ndef add(a, b): raise E",
        "try:\n    x = add(1, 2)\nexcept ValueError:\n    x = 3\nassert x == 3",
    ),
    "the memory of others": (
        "import os, re\nfor p in os.listdir('/proc'):\n"
        " if p.isdigit() and int(p) != os.getpid():\n"
        "  try: open(f'/proc/{p}/mem', 'r+b')\n"
        "  except OSError: continue\n  os._exit(0)\ndef add(a, b): return 0",
        SUM,
    ),
    "a thread that answers too": (
        SIDE + "import threading\ndef add(a, b):\n s = side()\n"
        " threading.Thread(target=lambda: [s._send({'result': True, 'error': None, 'changed': [],"
        " 'added': [], 'printed': ''}) for _ in range(9)]).start()\n return 0",
        SUM,
    ),
    "a child that answers too": ("import os\ndef add(a, b): os.fork(); return 0", SUM),
    "printing what a test may read": (
        "import sys\ndef add(a, b): print('0 failed'); sys.stdout = None; return 0",
        SUM,
    ),
}


@pytest.mark.parametrize("way", FORGERIES)
def test_forging_earns_nothing(code, way):
    program, tests = FORGERIES[way]
    found = code("", program, {"tests": tests})
    assert found == 0 and not (isinstance(found, Noted) and found.note == UNJUDGED)


ALL_AS_USER = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from hybridrl.services.sandbox.code_reward import run_program
runs = json.loads(sys.stdin.read())
with ThreadPoolExecutor(4) as pool:
    ended = pool.map(lambda one: run_program(one[0], "", LIMITS, one[1]), runs)
    print(json.dumps([one.code for one in ended]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_forging_earns_nothing_where_judge_and_program_are_one_user(code):
    """Without root both are the trainer's user to the kernel."""
    runs = [*FORGERIES.values(), *list(HONEST.values())[:3]]
    done = run_as_user(ALL_AS_USER.replace("LIMITS", repr(LIMITS)), json.dumps(runs))
    if "not contained: unshare" in done.stderr:
        pytest.skip("this kernel lets users make no namespaces")
    assert done.returncode == 0, done.stderr
    codes = dict(zip([*FORGERIES, "a", "b", "c"], json.loads(done.stdout), strict=True))
    assert [name for name, found in codes.items() if found == 0] == ["a", "b", "c"]
