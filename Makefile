# Towpath. `make help` lists the targets.
#
# variant   release (default), asan (ASan + UBSan), tsan, fuzz (clang + libFuzzer)
# CUDA      found by nvcc on PATH or CUDA_HOME; CUDA=0 leaves every .cu out
# WERROR=1  warnings are errors (CI)
# UCX_DIR   a UCX (include/, lib/) in place of the system's; .ucx/libucx, where deploy/setup.sh puts one, if there

VARIANT ?= release
WERROR  ?= 0
PREFIX  ?= /usr/local
B       := build/$(VARIANT)

# make's own default would be cc.
ifeq ($(origin CC),default)
CC      := gcc
endif
CFLAGS_release := -O3 -g
# -g1: line tables only; the vector kernels take minutes and a gigabyte with more.
CFLAGS_asan    := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
CFLAGS_tsan    := -O1 -g1 -fsanitize=thread -fno-omit-frame-pointer
CFLAGS_fuzz    := -O1 -g1 -fsanitize=address,undefined,fuzzer-no-link -fno-omit-frame-pointer
ifeq ($(VARIANT),fuzz)
CC      := clang
# clang warns of bounds in branches that a constant has closed.
CFLAGS_quiet := -Wno-array-bounds
else
# Text is cut on purpose wherever it has a bound, and gcc guesses wrongly about instrumented code.
CFLAGS_quiet := -Wno-format-truncation $(if $(filter asan tsan,$(VARIANT)),-Wno-maybe-uninitialized)
endif

PKGS    := libuv nng libcjson libpcre2-8 libxxhash
PC      := pkg-config
# nng and cJSON ship no .pc file on some releases; the plain -l is the fallback.
PKG_CFLAGS := $(shell $(PC) --cflags libuv libpcre2-8 libxxhash 2>/dev/null)
LIBS_BASE  := -lxxhash -lpthread -lm
LIBS_TEXT  := -lcjson -lpcre2-8
LIBS_NET   := -lnng -luv
LIBS_UCX   := -lucp -luct -lucs -lucm
UCX_DIR    ?= $(wildcard .ucx/libucx)
ifneq ($(UCX_DIR),)
PKG_CFLAGS += -isystem $(UCX_DIR)/include
LIBS_UCX   := -L$(UCX_DIR)/lib -Wl,-rpath,$(abspath $(UCX_DIR))/lib $(LIBS_UCX)
endif
HAVE_SYSTEMD := $(shell $(PC) --exists libsystemd 2>/dev/null && echo 1)
ifeq ($(HAVE_SYSTEMD),1)
DEFS      += -DTOW_HAVE_SYSTEMD=1
LIBS_NET  += -lsystemd
endif

# Sums must not depend on what the compiler contracts: fma is written where it is meant.
CFLAGS  += -std=c17 -Wall -Wextra -Wshadow -D_GNU_SOURCE -I. -MMD -MP -ffp-contract=off -fno-strict-aliasing \
           $(DEFS) $(PKG_CFLAGS) $(CFLAGS_$(VARIANT)) $(CFLAGS_quiet)
ifeq ($(WERROR),1)
CFLAGS  += -Werror
endif
LDFLAGS += $(filter -fsanitize=%,$(CFLAGS_$(VARIANT)))

# --- CUDA -------------------------------------------------------------------------------------
NVCC ?= $(firstword $(wildcard $(CUDA_HOME)/bin/nvcc) $(shell command -v nvcc 2>/dev/null))
CUDA ?= $(if $(NVCC),1,0)
# Sums must not depend on what the compiler contracts, as above. CUDA_ARCH=90a compiles one of them only.
CUDA_ARCH ?= 90a 120a
NVCCFLAGS := -O3 -lineinfo -std=c++17 --fmad=false -I. -Xcompiler -Wall,-Wno-unknown-pragmas \
             $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a))
ifeq ($(WERROR),1)
NVCCFLAGS += -Werror all-warnings
endif
# Sanitizers and fuzzers know nothing of the device; they run the CPU's half.
CU_SRC := $(if $(filter release,$(VARIANT)),$(if $(filter 1,$(CUDA)),$(shell find kernels -name '*.cu' 2>/dev/null | LC_ALL=C sort)))
ifneq ($(CU_SRC),)
CFLAGS    += -DTOW_CUDA=1
# The static run time: a program built with CUDA starts where there is none.
LIBS_CUDA := -L$(dir $(NVCC))../lib64 -lcudart_static -lstdc++ -ldl -lrt
endif

# --- sources: one static library per layer ----------------------------------------------------
LAYERS := base proto kernels text net kv model worker
DIR_base := common/base
DIR_proto := proto
DIR_kernels := kernels
DIR_text := common/text
DIR_net := common/net
DIR_kv := common/kv
DIR_model := common/model
DIR_worker := common/worker
srcs = $(shell find $(1) -name '*.c' 2>/dev/null | LC_ALL=C sort)
objs = $(patsubst %.c,$(B)/obj/%.o,$(1))
$(foreach l,$(LAYERS),$(eval SRC_$(l) := $(call srcs,$(DIR_$(l)))))
SRC_kernels_cu := $(CU_SRC)

LIB      = $(B)/lib/libtow-$(1).a
ALL_LIBS := $(foreach l,$(LAYERS),$(call LIB,$(l)))
# Router: no kernels besides kv_layout, no UCX; workers: everything.
LINK_router := $(call LIB,net) $(call LIB,text) $(call LIB,proto) $(call LIB,kernels) $(call LIB,base)
LINK_worker := $(call LIB,worker) $(call LIB,model) $(call LIB,kv) $(call LIB,net) $(call LIB,text) $(call LIB,proto) $(call LIB,kernels) $(call LIB,base)

# The pure halves of the programs (state machines, parsers) are linked into tests too.
PROG_router := router
PROG_prefill := prefill
PROG_decode := decode
PROG_ctl := deploy/ctl
PROGRAMS := $(foreach p,router prefill decode ctl,$(if $(wildcard $(PROG_$(p))/main.c),$(B)/bin/towpath-$(p)))
part = $(filter-out $(1)/main.c,$(call srcs,$(1)))
PROG_PART_OBJS := $(call objs,$(call part,router) $(call part,prefill) $(call part,decode) $(call part,deploy/ctl))

.DEFAULT_GOAL := all
.PHONY: all help clean test tests-build unit-test kernels-test golden-test cluster-test fault-test gpu-test gpu-sanitize gpu-bench fuzz fuzz-build \
        asan tsan bench format format-check lint check-includes install demo
# Objects made on the way to a test are kept, or every run would compile them again.
.SECONDARY:
.DELETE_ON_ERROR:
all: $(PROGRAMS) $(ALL_LIBS)

help:
	@echo "all               the four programs, at $(B)/bin (default)"
	@echo "demo              router + prefill + decode, one question, the streamed answer (DEVICE=cuda:0: on a GPU)"
	@echo "test              unit, kernels, golden, fault and cluster tests; closes with 'N passed, N failed'"
	@echo "unit-test kernels-test golden-test fault-test gpu-test cluster-test    one kind of them"
	@echo "asan tsan         the C tests under sanitizers"
	@echo "gpu-test gpu-bench    what needs a CUDA device: ops against their twins, goldens; times against floors"
	@echo "gpu-sanitize      the GPU tests under compute-sanitizer: memcheck, racecheck, initcheck (TOOLS=racecheck: one of them)"
	@echo "fuzz              every fuzzer for FUZZ_SECONDS (default 20) each"
	@echo "bench             benchmarks, as ratios to ceilings measured in the same run"
	@echo "check-includes    every #include points down the stack of layers"
	@echo "format format-check lint    clang-format in place, clang-format as a check, cppcheck"
	@echo "install           the programs to DESTDIR/PREFIX/bin (PREFIX=/usr/local)"
	@echo "clean             removes build/"
	@echo "settings          VARIANT=release|asan|tsan|fuzz WERROR=1 CUDA=0 UCX_DIR= CC= PREFIX= DESTDIR= FUZZ_SECONDS= PEERS='options of tests/gpu/peers.py'"

# What was compiled with other flags is compiled again. (-Werror changes no object.)
FLAGS_NOW := $(CC) $(filter-out -Werror,$(CFLAGS)) $(if $(CU_SRC),$(NVCC) $(filter-out -Werror all-warnings,$(NVCCFLAGS)))
FLAGS_FILE := $(B)/obj/flags
$(FLAGS_FILE):
	@mkdir -p $(@D)
	@printf '%s\n' '$(FLAGS_NOW)' >$@
ifneq ($(filter-out help clean format format-check lint check-includes,$(or $(MAKECMDGOALS),all)),)
ifneq ($(strip $(FLAGS_NOW)),$(strip $(shell cat $(FLAGS_FILE) 2>/dev/null)))
$(shell mkdir -p $(B)/obj; printf '%s\n' '$(FLAGS_NOW)' >$(FLAGS_FILE))
endif
endif

# One source of CPU kernels and of the digest, one object per instruction set; chosen at run time
# (kernels/cpu/dev.c, common/base/hash.c).
ISA_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mavx2 -mf16c -mprefer-vector-width=512
ISA_avx2   := -mavx2 -mfma -mf16c
# Every processor with AMX has the byte operations too.
ISA_amx    := $(ISA_avx512) -mavx512vbmi -mgfni -mamx-tile -mamx-bf16 -DKERN_BUILD_AMX
ifeq ($(VARIANT),fuzz)
# No fuzzer reaches a kernel, and clang needs minutes to instrument the vector copies. The plain ones stay.
ISA_avx512 += -fno-sanitize=all
ISA_avx2   += -fno-sanitize=all
ISA_amx    += -fno-sanitize=all
endif
$(B)/obj/%_cpu.avx512.o: %_cpu.c $(FLAGS_FILE)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA_avx512) -c $< -o $@
$(B)/obj/%_cpu.amx.o: %_cpu.c $(FLAGS_FILE)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA_amx) -c $< -o $@
$(B)/obj/%_cpu.avx2.o: %_cpu.c $(FLAGS_FILE)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(ISA_avx2) -c $< -o $@
$(B)/obj/%.o: %.c $(FLAGS_FILE)
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) -c $< -o $@
$(B)/obj/%.cu.o: %.cu $(FLAGS_FILE)
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c $< -o $@

ifneq ($(filter x86_64%,$(shell $(CC) -dumpmachine)),)
isa_objs = $(foreach i,$(2),$(patsubst %.c,$(B)/obj/%.$(i).o,$(filter %_cpu.c,$(1))))
OBJ_kernels_isa := $(call isa_objs,$(SRC_kernels),avx2 avx512 amx)
OBJ_base_isa := $(call isa_objs,$(SRC_base),avx2 avx512)
endif

define lib_rule
$(call LIB,$(1)): $(call objs,$(SRC_$(1))) $(OBJ_$(1)_isa) $(patsubst %.cu,$(B)/obj/%.cu.o,$(SRC_$(1)_cu))
	@mkdir -p $$(@D)
	@rm -f $$@
	@ar rcs $$@ $$^
endef
$(foreach l,$(LAYERS),$(eval $(call lib_rule,$(l))))

$(B)/bin/towpath-router: $(call objs,$(call srcs,router)) $(LINK_router)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) $(LINK_router) $(LIBS_NET) $(LIBS_TEXT) $(LIBS_BASE)
$(B)/bin/towpath-%: $(LINK_worker)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $(filter %.o,$^) $(LINK_worker) $(LIBS_NET) $(LIBS_TEXT) $(LIBS_UCX) $(LIBS_CUDA) $(LIBS_BASE)
$(B)/bin/towpath-prefill: $(call objs,$(call srcs,prefill))
$(B)/bin/towpath-decode: $(call objs,$(call srcs,decode))
$(B)/bin/towpath-ctl: $(call objs,$(call srcs,deploy/ctl))

# --- tests: tests/<kind>/<name>_test.c -> build/<variant>/test/<kind>/<name>_test ----------------
SUPPORT := $(call objs,$(call srcs,tests/support))
KINDS   := unit kernels golden fault
# On a machine without a device these say so and are skipped.
ifneq ($(CU_SRC),)
KINDS   += gpu
endif
TESTS   := $(foreach k,$(KINDS),$(wildcard tests/$(k)/*_test.c))
TEST_BINS := $(patsubst tests/%.c,$(B)/test/%,$(TESTS))
LINK_all = $(PROG_PART_OBJS) $(LINK_worker)
LIBS_all = $(LIBS_NET) $(LIBS_TEXT) $(LIBS_UCX) $(LIBS_CUDA) $(LIBS_BASE)
# alloc_test makes our own calls of these fail, see tests/fault/README.md.
$(B)/test/fault/alloc_test: LDFLAGS += $(foreach f,malloc calloc realloc aligned_alloc free strdup strndup,-Wl,--wrap=$(f))
$(B)/test/%: $(B)/obj/tests/%.o $(SUPPORT) $(PROG_PART_OBJS) $(ALL_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $(filter $(B)/obj/tests/%,$^) $(LINK_all) -lcmocka $(LIBS_all)

# Random cases of every op, on either back end.
$(B)/test/kernels/parity_test $(B)/test/gpu/parity_test: $(B)/obj/tests/kernels/op_cases.o

# Programs that cluster tests drive.
GPU_BENCHES := $(if $(CU_SRC),$(patsubst tests/gpu/%.c,$(B)/bench/gpu/%,$(wildcard tests/gpu/bench_*.c)))
HELPER_BINS := $(patsubst tests/%.c,$(B)/test/%,$(wildcard tests/cluster/*.c)) $(GPU_BENCHES)
tests-build: $(TEST_BINS) $(HELPER_BINS)
unit-test kernels-test golden-test fault-test gpu-test: %-test: all
	@$(MAKE) --no-print-directory $(filter $(B)/test/$*/% $(if $(filter gpu,$*),$(B)/test/golden/% $(B)/test/kernels/%_golden_test $(B)/test/unit/model_forward_test),$(TEST_BINS))
	@sh tests/run.sh $(B) $*
gpu-sanitize: $(filter $(B)/test/gpu/%,$(TEST_BINS))
	@sh tests/gpu/sanitize.sh $(B) $(TOOLS)
cluster-test: all $(HELPER_BINS)
	@sh tests/run.sh $(B) cluster
test: all tests-build
	@sh tests/run.sh $(B) $(KINDS) cluster
# Whole-model runs take minutes under a sanitizer, a quarter of an hour under TSan; block_test, trace_golden_test and
# edge_test run the same code and the same thread team on less.
SLOW_asan := golden/smoke_test
SLOW_tsan := golden/smoke_test golden/explain_test golden/eval_test golden/rank_test golden/numerics_test golden/capture_test kernels/parity_test
asan tsan:
	@$(MAKE) --no-print-directory VARIANT=$@ all tests-build
	@TOW_SKIP="$(SLOW_$@)" sh tests/run.sh build/$@ $(KINDS)

FUZZ_SECONDS ?= 20
FUZZERS := $(patsubst tests/fuzz/%.c,$(B)/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
$(B)/fuzz/%: $(B)/obj/tests/fuzz/%.o $(SUPPORT) $(PROG_PART_OBJS) $(ALL_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -fsanitize=fuzzer -o $@ $< $(SUPPORT) $(LINK_all) $(LIBS_all)
fuzz-build: $(FUZZERS)
fuzz:
	@$(MAKE) --no-print-directory VARIANT=fuzz fuzz-build
	@sh tests/run_fuzz.sh build/fuzz $(FUZZ_SECONDS)

$(B)/bench/gpu/%: $(B)/obj/tests/gpu/%.o $(SUPPORT) $(PROG_PART_OBJS) $(ALL_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $< $(SUPPORT) $(LINK_all) $(LIBS_all)
# The trace of bench_step.
ifneq ($(wildcard $(dir $(NVCC))../include/cupti.h),)
$(B)/obj/tests/gpu/bench_step.o: CFLAGS += -DTOW_CUPTI=1 -isystem $(dir $(NVCC))../include
endif
gpu-bench: all $(GPU_BENCHES)
	@$(if $(GPU_BENCHES),:,echo "gpu-bench: $(B) was built without CUDA: ours skipped")
	@for b in $(GPU_BENCHES); do $$b || [ $$? -eq 77 ] || exit 1; done
	@python3 tests/gpu/peers.py $(PEERS) || [ $$? -eq 77 ]

BENCHES := $(patsubst tests/bench/%.c,$(B)/bench/%,$(wildcard tests/bench/bench_*.c))
$(B)/bench/%: $(B)/obj/tests/bench/%.o $(SUPPORT) $(PROG_PART_OBJS) $(ALL_LIBS)
	@mkdir -p $(@D)
	$(CC) $(LDFLAGS) -o $@ $< $(SUPPORT) $(LINK_all) $(LIBS_all)
# Its op table counts; see bench_model.c.
$(B)/bench/bench_model: LDFLAGS += -Wl,--wrap=kern_dev_ops
bench: all $(BENCHES)
	@sh tests/bench/run.sh $(B)

demo: all
	@sh deploy/run-demo.sh

# --- housekeeping -----------------------------------------------------------------------------
FORMATTED = $(shell git ls-files '*.c' '*.h' '*.cu' '*.cuh')
format:
	clang-format -i $(FORMATTED)
format-check:
	clang-format --dry-run -Werror $(FORMATTED)
check-includes:
	@python3 tests/check_includes.py
# invalidPointerCast: scratch and tails are bytes that hold floats, aligned, and the build says -fno-strict-aliasing.
# ctuuninitvar: takes the address of an array in a struct that is about to be filled for a read of it.
lint: check-includes
	cppcheck --quiet --enable=warning,portability --inline-suppr --suppress=invalidPointerCast --suppress=ctuuninitvar -I. --error-exitcode=1 \
	    common proto kernels router prefill decode deploy/ctl
install: all
	install -d $(DESTDIR)$(PREFIX)/bin
	install -m 755 $(PROGRAMS) $(DESTDIR)$(PREFIX)/bin
clean:
	rm -rf build

-include $(shell find $(B)/obj -name '*.d' 2>/dev/null)
