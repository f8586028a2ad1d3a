"""LLVM's tools: for functions of this process, and for those of a library."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from ....errors import JobError
from . import code_cache, portable
from .building import NATIVE, Machine
from .portable import version

#: changes whenever object code made before must not be loaded any more
_VERSION = "4"
#: an environment variable: the family of processors (see processors/) whose measurements count, and no wider vectors
FAMILY = "RECOMPUTE_PROCESSOR"


class Toolchain:
    """LLVM for this processor, and an engine that functions are loaded into.

    `fused`: whether a · b + c is one instruction here.
    """

    #: whether this process can run the code
    runs = True

    def __init__(self, gomp: Any = None, *, portable: bool = False) -> None:
        """`gomp`: the OpenMP runtime, whose functions code may call; `portable`: code has the bits of every machine's
        (see portable.py)."""
        import llvmlite
        import llvmlite.binding as llvm

        self.llvm = llvm
        if gomp is not None:
            for name in ("GOMP_parallel", "omp_get_thread_num"):
                llvm.add_symbol(name, ctypes.cast(getattr(gomp, name), ctypes.c_void_p).value)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        self.cpu = llvm.get_host_cpu_name()
        features = llvm.get_host_cpu_features()
        if "avx512f" in features:  # no feature of other processors than x86
            features["prefer-256-bit"] = False  # the loops are long: full vectors pay
        if os.environ.get(FAMILY, "").endswith("-avx2"):
            features.update(dict.fromkeys((f for f in features if f.startswith(("avx512", "avx10", "amx"))), False))
        self.features = features.flatten()
        target = llvm.Target.from_default_triple()
        self.machine = target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, jit=True)
        self.engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), self.machine)
        self.portable, self.fused = portable, "+fma" in self.features or not target.triple.startswith("x86_64")
        self.made_by = (
            f"{_VERSION} {llvmlite.__version__} {target.triple} {self.cpu} {self.features} {portable and version()}"
        )
        self.addresses: dict[str, int] = {}

    def key(self, *parts: str) -> str:
        """Names object code by all that it depends on."""
        return hashlib.sha256("\0".join((self.made_by, *parts)).encode()).hexdigest()[:32]

    def has(self, function: str) -> bool:
        """Whether this process has a function of that name, which object code can call."""
        return bool(self.llvm.address_of_symbol(function))

    @property
    def wide(self) -> bool:
        """Whether kernels are written for registers of 512 bits, on which the order of sums depends."""
        return "+avx512f" in self.features and not self.portable

    def adapted(self, ir: str) -> str:
        """A module's text as it is compiled here."""
        return portable.adapted(ir, fused=self.fused) if self.portable else ir

    def address(self, key: str, make: Callable[[], Any], *, in_vectors: bool) -> int:
        """The address of the function that the key names, from the cache of object code or as it is made."""
        code = code_cache.kept(key, self.has)
        if code is None:
            code = self.object_code(make(), key, in_vectors=in_vectors)
            code_cache.keep(key, code)
        return self.load(key, code)

    def load(self, key: str, code: bytes) -> int:
        """The address of the function in this object code."""
        self.engine.add_object_file(self.llvm.ObjectFileRef.from_data(code))
        self.engine.finalize_object()
        address = self.engine.get_function_address(f"k_{key}")
        if not address:
            raise JobError(f"native code without the function k_{key}")
        return int(address)

    def object_code(self, module: Any, key: str, *, in_vectors: bool) -> bytes:
        """Machine code of a module; see `optimised`."""
        return bytes(self.machine.emit_object(self.optimised(module, key, in_vectors=in_vectors)))

    def optimised(self, module: Any, key: str, *, in_vectors: bool) -> Any:
        """A module after LLVM's passes, whose `kernel` gets the name that belongs to the key.

        `in_vectors`: its loops are written in vectors, unrolled and with what does not change in front of them: passes
        that do this would find nothing, and take ten times as long as those that are run.
        """
        module.get_function("kernel").name = f"k_{key}"
        module.verify()
        options = self.llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = True
        builder = self.llvm.create_pass_builder(self.machine, options)
        passes = self.llvm.create_new_module_pass_manager() if in_vectors else builder.getModulePassManager()
        if in_vectors:
            passes.add_sroa_pass()
            passes.add_instruction_combine_pass()
            passes.add_simplify_cfg_pass()
        passes.run(module, builder)
        if self.portable:
            portable.check(module)
        wanted = [f.name for f in module.functions if f.is_declaration and f.name.startswith(("numba", "NRT", "Py"))]
        if wanted:  # another process, which finds the object code in the cache, would not have it
            raise JobError(f"a kernel needs numba's runtime: {', '.join(wanted)}")
        return module


class Building(Toolchain):
    """LLVM for a library's machine.  Functions are kept as bitcode; where this process can run them, they have
    addresses in it, and else numbers that stand for them."""

    def __init__(self, host: Toolchain, machine: Machine) -> None:
        self.llvm, self.host, self.target = host.llvm, host, machine
        self.llvm.initialize_all_targets()
        self.llvm.initialize_all_asmprinters()
        native = machine.cpu == NATIVE
        self.cpu, self.features = (host.cpu, host.features) if native else (machine.cpu, machine.features)
        target = self.llvm.Target.from_triple(machine.triple)
        self.fused = "+fma" in self.features if native and machine.name == "x86_64" else machine.fused
        self.machine = target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, reloc="pic", codemodel="default"
        )
        self.runs = platform.machine() == machine.name and {f for f in self.features.split(",") if f[0] == "+"} <= {
            *host.features.split(",")
        }
        self._loading = target.create_target_machine(cpu=self.cpu, features=self.features, opt=3, jit=True)
        self.made_by = f"{host.made_by} for {machine} {machine.portable and version()}"
        self.portable = machine.portable
        self.addresses: dict[str, int] = {}
        self.engine = host.engine
        #: by address: the function's key and its module as bitcode
        self.modules: dict[int, tuple[str, bytes]] = {}

    def adapted(self, ir: str) -> str:
        """Where the machine has no a · b + c in one instruction, it takes two, and not a function of a library."""
        ir = super().adapted(ir)
        return ir if self.fused else ir.replace("@llvm.fma.", "@llvm.fmuladd.")

    def address(self, key: str, make: Callable[[], Any], *, in_vectors: bool) -> int:
        """The function's address in this process, or its number; its module is kept."""
        code = code_cache.kept_module(key)
        if code is None:
            module = make()
            module.triple, module.data_layout = self.machine.triple, str(self.machine.target_data)
            code = self.optimised(module, key, in_vectors=in_vectors).as_bitcode()
            code_cache.keep_module(key, code)
        at = len(self.modules) + 1
        if self.runs:
            at = self.load(key, self._loading.emit_object(self.llvm.parse_bitcode(code)))
        self.modules[at] = key, code
        return at

    def together(self, names: Mapping[int, str], more: str = "") -> Any:
        """One module of functions (by address) under new names, and of what a module's text defines beside them."""
        parsed = self.llvm.parse_assembly(more)
        parsed.triple, parsed.data_layout = self.machine.triple, str(self.machine.target_data)
        for at, name in names.items():
            key, code = self.modules[at]
            module = self.llvm.parse_bitcode(code)
            module.get_function(f"k_{key}").name = name
            parsed.link_in(module)
        for name in names.values():
            parsed.get_function(name).visibility = "hidden"
        parsed.verify()
        return parsed
