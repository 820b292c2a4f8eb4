# Finds LibTorch and defines the imported target weft::torch, with torch's headers, libtorch_cpu and libc10.
# torch's own CMake package is not used: in a CUDA build of torch it requires the CUDA toolkit, which weft does not.
#
# Searched in this order: CMAKE_PREFIX_PATH (a LibTorch folder, or torch.utils.cmake_prefix_path), the folders of
# `weft_torch_hints`, the torch package of Python3_EXECUTABLE.
# Sets WEFT_TORCH_FOUND, WEFT_TORCH_ROOT and WEFT_TORCH_VERSION; WEFT_TORCH_NOT_FOUND_MESSAGE says what to do.

find_path(WEFT_TORCH_INCLUDE_DIR torch/headeronly/version.h HINTS ${weft_torch_hints}
  PATH_SUFFIXES include ../../include NO_CMAKE_SYSTEM_PATH NO_CACHE)
if(NOT WEFT_TORCH_INCLUDE_DIR AND Python3_EXECUTABLE)
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "import importlib.util; print(*importlib.util.find_spec('torch').submodule_search_locations)"
    OUTPUT_VARIABLE weft_torch_package OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  find_path(WEFT_TORCH_INCLUDE_DIR torch/headeronly/version.h PATHS ${weft_torch_package}/include
    NO_DEFAULT_PATH NO_CACHE)
endif()

set(WEFT_TORCH_FOUND FALSE)
if(NOT WEFT_TORCH_INCLUDE_DIR)
  set(WEFT_TORCH_NOT_FOUND_MESSAGE "weft: torch not found in CMAKE_PREFIX_PATH or in Python '${Python3_EXECUTABLE}'. \
Run 'pip install torch', or set -DPython3_EXECUTABLE=<a Python with torch> or -DCMAKE_PREFIX_PATH=<LibTorch folder>.")
  return()
endif()

get_filename_component(WEFT_TORCH_ROOT ${WEFT_TORCH_INCLUDE_DIR}/.. ABSOLUTE)
set(WEFT_TORCH_INCLUDE_DIR ${WEFT_TORCH_ROOT}/include)
file(STRINGS ${WEFT_TORCH_INCLUDE_DIR}/torch/headeronly/version.h weft_torch_lines REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" weft_torch_lines "${weft_torch_lines}")
list(JOIN weft_torch_lines "." WEFT_TORCH_VERSION)
find_library(WEFT_TORCH_CPU_LIBRARY torch_cpu PATHS ${WEFT_TORCH_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
find_library(WEFT_TORCH_C10_LIBRARY c10 PATHS ${WEFT_TORCH_ROOT}/lib NO_DEFAULT_PATH NO_CACHE)
if(NOT WEFT_TORCH_CPU_LIBRARY OR NOT WEFT_TORCH_C10_LIBRARY)
  set(WEFT_TORCH_NOT_FOUND_MESSAGE "weft: libtorch_cpu or libc10 is missing in ${WEFT_TORCH_ROOT}/lib. Reinstall torch.")
  return()
endif()

set(WEFT_TORCH_FOUND TRUE)
if(NOT TARGET weft::torch)
  add_library(weft::torch INTERFACE IMPORTED)
  set_target_properties(weft::torch PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${WEFT_TORCH_INCLUDE_DIR};${WEFT_TORCH_INCLUDE_DIR}/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"  # as torch's package defines them
    INTERFACE_LINK_LIBRARIES "${WEFT_TORCH_CPU_LIBRARY};${WEFT_TORCH_C10_LIBRARY}")
endif()
