// A recording: the same pictures, at any step.

import { $, num, on, read, tell } from "../parts.js";

const PLAY_MS = 120;

let show = null; // draws a picture, as on the live page
let frames = [];
let at = 0; // index of the frame
let wanted = null; // index of the next one
let isBusy = false;
let timer = 0;

export async function open(draw) {
	show = draw;
	const facts = await read("film");
	frames = facts.frames;
	$("film").hidden = false;
	$("film-at").max = Math.max(frames.length - 1, 0);
	on("film-at", "input", () => jump($("film-at").valueAsNumber));
	on("film-back", "click", () => jump(at - 1));
	on("film-on", "click", () => jump(at + 1));
	on("film-play", "click", () => play(!timer));
	return facts;
}

function jump(index) {
	play(false);
	go(index);
}

// The last frame up to a step.
export const seek = (step) => jump(frames.findLastIndex((frame) => frame.step <= step));

export async function go(index) {
	if (!frames.length) return;
	wanted = Math.min(Math.max(index, 0), frames.length - 1);
	if (isBusy) return;
	isBusy = true;
	try {
		while (wanted !== null) {
			const next = wanted;
			wanted = null;
			const picture = await read("film/" + next);
			at = next;
			show(picture);
			say(frames[at]);
		}
	} finally {
		isBusy = false;
	}
}

function say(frame) {
	const words = `step ${num(frame.step)} of ${num(frames.at(-1).step)} · ${frame.at_s.toFixed(2)} s`;
	tell("film-text", words);
	$("film-at").value = at;
	$("film-at").ariaValueText = words;
}

function play(isOn) {
	clearTimeout(timer);
	timer = isOn ? setTimeout(turn) : 0;
	tell("film-play", isOn ? "Stop" : "Play");
}

async function turn() {
	const isLast = at >= frames.length - 1;
	if (!isLast) await go(at + 1);
	if (isLast) play(false);
	else if (timer) timer = setTimeout(turn, PLAY_MS);
}
