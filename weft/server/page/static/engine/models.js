// The models of a server with several: which one is shown and asked, and whether it is in memory.

import { $, choose, num, on, read, span, tell } from "../parts.js";

const LOOK_MS = 4000;
const SOON_MS = 700; // while a model comes or goes
const LOADED = "loaded";
const MOVING = new Set(["loading", "unloading", "growing", "shrinking"]);

let chosen = "";
let states = new Map(); // name -> status
let began = 0; // when the chosen model began to come or go

// Shows the picker if there is a choice; `changed` is called with the name of the chosen model.
export async function open(changed) {
	on("model-pick", "change", () => {
		pick($("model-pick").value);
		changed(chosen);
	});
	on("model-load", "click", () => toggle().then(() => changed(chosen)));
	if (await look() && chosen) changed(chosen);
	again();
}

async function again() {
	const isMoving = MOVING.has(states.get(chosen)?.status.value);
	await new Promise((done) => setTimeout(done, isMoving ? SOON_MS : LOOK_MS));
	if (!document.hidden) await look();
	again();
}

function pick(name) {
	chosen = name;
	choose(name);
	show();
}

// Returns whether there are several models.
async function look() {
	try {
		const { data } = await read("models", "user");
		if (data.length < 2) return false;
		const before = [...states.keys()].join();
		states = new Map(data.map((one) => [one.id, one]));
		if (before !== [...states.keys()].join()) {
			$("model-pick").replaceChildren(...data.map(({ id }) => new Option(id, id)));
		}
		if (!states.has(chosen)) pick(data.find((one) => one.is_default)?.id ?? data[0].id);
		show();
		return true;
	} catch {
		return false; // the chat says what is wrong when it is used
	}
}

function show() {
	$("models").hidden = false;
	for (const option of $("model-pick").options) {
		const { status, waiting_requests: waiting } = states.get(option.value);
		const wait = waiting ? `, ${num(waiting)} wait` : "";
		option.textContent = status.value === LOADED && !waiting ? option.value : `${option.value} (${status.value}${wait})`;
	}
	$("model-pick").value = chosen;
	const status = states.get(chosen)?.status;
	const isIn = status?.value === LOADED;
	tell("model-load", isIn ? "Unload" : "Load");
	progress(status);
	$("model-load").title = status?.reason || (isIn ? "Unload this model after its open requests" : "Load this model now");
}

// How far a model has come, if its time is known.
function progress({ value, eta_s: eta }) {
	const bar = $("model-progress");
	bar.hidden = !MOVING.has(value);
	if (bar.hidden) {
		began = 0;
		return;
	}
	began ||= performance.now();
	const passed = (performance.now() - began) / 1000;
	if (Number.isFinite(eta)) bar.value = passed / Math.max(passed + eta, 0.1);
	else bar.removeAttribute("value");
	bar.title = Number.isFinite(eta) ? `${value}, ${span(eta)} left` : value;
}

async function toggle() {
	const isIn = states.get(chosen)?.status.value === LOADED;
	$("model-load").disabled = true;
	setTimeout(look, SOON_MS);
	try {
		await read(isIn ? "models/unload" : "models/load", "admin", { model: chosen });
	} catch (error) {
		tell("state", error.message);
	}
	$("model-load").disabled = false;
	await look();
}
