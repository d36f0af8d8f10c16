// The tokens of each expert: a line per layer, a cell per expert.

import { $, el, num, on, read, sum, tell } from "../parts.js";

const AGAIN_MS = 2000;
const MOST = 3; // times an even share: full colour of a cell

let isCounting = false;
let askedAt = 0;

export function introduce({ has_experts: areThere }) {
	$("experts").hidden = !areThere;
	if (areThere) look();
}

// Called with each picture.
export function goOn() {
	if (isCounting && performance.now() - askedAt > AGAIN_MS) look();
}

async function look(change) {
	askedAt = performance.now();
	try {
		if (change) await read(change + "_expert_distribution_record", "admin", {});
		show(await read("experts", "admin"));
	} catch (error) {
		tell("experts-text", error.message);
	}
}

on("experts-count", "click", () => look(isCounting ? "stop" : "start"));

function show({ recording, layers, prefill, decode }) {
	isCounting = recording;
	tell("experts-count", isCounting ? "Stop" : "Count");
	tell("experts-text", `${num(sum([prefill, decode].flat(2)))} choices · colour: share of the layer · right: who has most, in even shares`);
	const counts = prefill.map((of, i) => of.map((count, expert) => count + decode[i][expert]));
	$("layers").replaceChildren(...layers.map((layer, i) => line(layer, counts[i])));
}

function line(layer, counts) {
	const even = Math.max(sum(counts), 1) / counts.length;
	const wide = 100 / counts.length;
	const cells = counts.map((count, i) => {
		const share = Math.min((100 * count) / even / MOST, 100);
		return `color-mix(in oklab, var(--cached) ${share}%, var(--line)) ${wide * i}% ${wide * (i + 1)}%`;
	});
	const bar = el("span", "pool");
	bar.style.background = `linear-gradient(90deg, ${cells})`;
	const top = counts.indexOf(Math.max(...counts));
	return el("li", "row lane", `layer ${layer}`, bar, el("span", "so", `${top}: ${(counts[top] / even).toFixed(1)} ×`));
}
