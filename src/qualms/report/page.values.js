"use strict";
/* What the scripts of all pages share: elements, and values as they come from the page's data and as they are written. */

const byId = (id) => document.getElementById(id);
const element = (name, text, className) => {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

/* Arrays in the page's data are the bytes of their numbers; words that come again are written once. */
const KINDS = { u1: Uint8Array, i4: Int32Array, f4: Float32Array, f8: Float64Array };
const unpacked = (found) =>
  found && new KINDS[found.kind](Uint8Array.from(atob(found.bytes), (c) => c.charCodeAt(0)).buffer);
const decoded = (found) => found && Array.from(unpacked(found.codes), (code) => found.words[code]);

const percent = (share) => `${Number((100 * share).toFixed(1))}\u00a0%`;
const brief = (x) => String(Number(x.toPrecision(4)));

/* How many of some rising numbers are below x, and how many are at most x. */
const below = (sorted, x, orEqual = false) => {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x || (orEqual && sorted[middle] === x)) low = middle + 1;
    else high = middle;
  }
  return low;
};
const upTo = (sorted, x) => below(sorted, x, true);

/* The threshold: the smallest that accepts this share of the known scores, as qualms.Threshold.from_scores has it. */
const thresholdFor = (known, share) => known[Math.max(1, Math.ceil(share * known.length - 1e-9)) - 1];
