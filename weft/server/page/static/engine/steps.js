// One bar per step: height = time, colours = kind of work. For keyboards, a slider.

import { $, el, join, num, on, plural, tell } from "../parts.js";

const MODES = ["prompts", "decoding", "both", "layers of prompts", "guesses"];
const KEPT = 1200;
const WIDTH = 5; // bar and gap
const ARRIVE_MS = 220; // for the bars of a picture to appear

const strip = $("steps");
const canvas = $("steps-canvas");
const drawing = canvas.getContext("2d");
let pick = null; // called with the number of the chosen step
let list = [];
let shown = 0; // bars that have appeared, with a fraction of the next
let top = 1; // ms of the highest bar, smoothed
let at = -1; // index of the chosen one
let rate = 0; // bars per millisecond
let marked = null; // first and last number of the steps of a request
let frame = 0;
let width = 0; // of the canvas, in CSS pixels
let height = 0;

export const onPick = (act) => { pick = act; };

export function clear() {
	list = [];
	shown = 0;
	marked = null;
	choose(-1);
}

// Adds the steps of a picture, in columns; those of a recording are complete.
export function add(columns, isWhole) {
	const last = columns.number.at(-1) ?? Infinity;
	if (isWhole || last < list.at(-1)?.number) clear();
	const known = list.at(-1)?.number ?? -1;
	columns.number.forEach((number, i) => {
		if (number > known) list.push(Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[i]])));
	});
	const over = Math.max(list.length - KEPT, 0);
	list.splice(0, over);
	shown = Math.max(shown - over, 0);
	if (at >= 0) at = Math.max(at - over, 0);
	say();
	come(isWhole);
}

// The chosen step in words, or all steps.
function say() {
	if (!list.length) return tell("steps-text", "no step yet");
	const last = list.at(-1);
	const step = list[at] || last;
	const prompts = step.prompts && step.prompts < step.rows ? `, ${step.prompts} of them prompts` : "";
	const words = join(
		`step ${num(step.number)}`, MODES[step.mode], plural(step.rows, "row") + prompts,
		`${plural(step.tokens, "token")} in ${step.ms.toFixed(2)} ms`, `${num(step.waiting)} waiting`,
	);
	const times = list.slice(-200).map((one) => one.ms).sort((a, b) => a - b);
	const [half, most] = [times[times.length >> 1], times.at(-1)].map((ms) => ms.toFixed(1));
	const isGone = marked && marked[1] < list[0].number;
	const own = marked && `the marked request: steps ${num(marked[0])} to ${num(marked[1])}${isGone ? ", no longer drawn" : ""}`;
	tell("steps-text", at < 0 ? own || `${num(last.number)} · median ${half} ms · longest ${most} ms` : words);
	strip.ariaValueMin = list[0].number;
	strip.ariaValueMax = last.number;
	strip.ariaValueNow = step.number;
	strip.ariaValueText = words;
}

// Marks the steps of a request, and says which they are.
export function mark(first, last) {
	marked = [first, last];
	say();
	draw();
	strip.scrollIntoView({ block: "nearest" });
	strip.focus({ preventScroll: true });
}

// ---- choosing a step

function point(event) {
	const back = Math.floor((strip.getBoundingClientRect().right - event.clientX) / WIDTH);
	choose(Math.floor(shown) - 1 - back);
}

function take() {
	if (at >= 0) pick?.(list[at].number);
}

on("steps", "pointermove", point);
for (const end of ["pointerleave", "blur"]) on("steps", end, () => choose(-1));
on("steps", "click", (event) => { point(event); take(); });
on("steps", "keydown", (event) => {
	const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };
	if (event.key === "Enter") take();
	if (!(event.key in moves) || !list.length) return;
	event.preventDefault();
	const last = list.length - 1;
	choose(Math.min(Math.max((at < 0 ? last : at) + moves[event.key], 0), last));
});

function choose(index) {
	at = list[index] ? index : -1;
	say();
	draw();
}

// ---- drawing

function come(isWhole) {
	const isAtOnce = isWhole || document.hidden || matchMedia("(prefers-reduced-motion: reduce)").matches;
	// A page far behind starts near the end.
	shown = Math.max(shown, list.length - (isAtOnce ? 0 : 240));
	rate = Math.max(list.length - shown, 1) / ARRIVE_MS;
	if (!frame) move(performance.now(), performance.now());
}

function move(before, now) {
	shown = Math.min(shown + rate * Math.max(now - before, 0), list.length);
	draw();
	frame = shown < list.length ? requestAnimationFrame((next) => move(now, next)) : 0;
}

const colours = {};

// Redraws everything, for a new size or new colours.
export function paint() {
	const probe = el("i");
	strip.append(probe);
	for (const name of ["decode", "cached", "prefill", "ink", "soft"]) {
		probe.style.color = `var(--${name})`;
		colours[name] = getComputedStyle(probe).color;
	}
	probe.remove();
	({ clientWidth: width, clientHeight: height } = canvas);
	canvas.width = width * devicePixelRatio;
	canvas.height = height * devicePixelRatio;
	drawing.scale(devicePixelRatio, devicePixelRatio);
	draw();
}

function draw() {
	drawing.clearRect(0, 0, width, height);
	const end = Math.ceil(shown);
	const begin = Math.max(end - Math.ceil(width / WIDTH) - 1, 0);
	const highest = Math.max(1, ...list.slice(begin, end).map((step) => step.ms));
	top = highest > top ? highest : top + (highest - top) * 0.05;
	const bars = { decode: new Path2D(), cached: new Path2D(), prefill: new Path2D() };
	const under = new Path2D();
	for (let i = begin; i < end; i++) {
		const step = list[i];
		const x = width - (shown - i) * WIDTH;
		// The square root keeps short steps visible beside long ones.
		const tall = Math.max(Math.sqrt(step.ms / top) * (height - 16), 2);
		const decoding = step.rows - step.prompts;
		// In a mixed step, each decoding row has one token, the prompts the rest.
		const isMixed = decoding > 0 && step.tokens;
		const share = isMixed ? (step.tokens - decoding) / step.tokens : 1;
		bars[step.mode === 4 ? "cached" : "decode"].rect(x, height - tall, WIDTH - 1.5, tall);
		if (step.prompts && share > 0) bars.prefill.rect(x, height - tall, WIDTH - 1.5, Math.max(tall * share, 2));
		if (marked && step.number >= marked[0] && step.number <= marked[1]) under.rect(x, height - 4, WIDTH, 4);
		if (i === at) {
			drawing.strokeStyle = colours.ink;
			drawing.strokeRect(x - 0.75, height - tall - 1, WIDTH, tall + 2);
		}
	}
	for (const [name, path] of Object.entries(bars)) {
		drawing.fillStyle = colours[name];
		drawing.fill(path);
	}
	drawing.fillStyle = colours.ink;
	drawing.fill(under);
	drawing.fillStyle = colours.soft;
	drawing.font = "10px system-ui, sans-serif";
	drawing.fillText(`${top.toFixed(top < 10 ? 1 : 0)} ms`, 6, 12);
}

new ResizeObserver(paint).observe(strip);
